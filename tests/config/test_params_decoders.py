"""Decoders' params that come with the package against the public ones."""

import pytest
from params_samples import public_params

from headwater.config import find_params, load_params
from headwater.convert.formats.base import decoder_meaning

PUBLIC = {
    "bloom/bloom_7b1": "bloom/configs/params_bloom_7b",
    "btlm/btlm_3b": "btlm/configs/params_btlm_2p7b_2k",
    "btlm/btlm_3b_8k": "btlm/configs/params_btlm_2p7b_8k",
    "falcon/falcon_7b": "falcon/configs/params_falcon_7b",
    "falcon/falcon_40b": "falcon/configs/params_falcon_40b",
    "falcon/falcon_180b": "falcon/configs/params_falcon_180b",
    "gemma2/gemma2_9b": "gemma2/configs/params_gemma2_9b_msl8k",
    "gemma2/gemma2_27b": "gemma2/configs/params_gemma2_27b_msl8k",
    "gptj/gptj_6b": "gptj/configs/params_gptj_6B",
    "jais/jais_13b": "jais/configs/params_jais_13b",
    "jais/jais_30b": "jais/configs/params_jais_30b_phase1",
    "llama/code_llama_7b": "llama/configs/params_code_llama_7b",
    "llama/code_llama_70b": "llama/configs/params_code_llama_70b",
    "llama/llama2_7b": "llama/configs/params_llama2_7b",
    "llama/llama2_13b": "llama/configs/params_llama2_13b",
    "llama/llama2_70b": "llama/configs/params_llama2_70b",
    "llama/llama3p1_8b": "llama/configs/params_llama3p1_8b_msl_8k",
    "llama/llama3p1_70b": "llama/configs/params_llama3p1_70b_msl_8k",
    "llama/llama3p1_405b": "llama/configs/params_llama3p1_405b_msl_128k",
    "llama/llama3p2_1b": "llama/configs/params_llama3p2_1b_msl_8k",
    "llama/llama3p2_3b": "llama/configs/params_llama3p2_3b_msl_8k",
    "llama/llama3p3_70b": "llama/configs/params_llama3p3_70b_msl_128k",
    "llama/wizardlm_13b": "llama/configs/params_wizardlm_13b",
    "mistral/mistral_7b": "mistral/configs/params_mistral_7B_msl128k",
    "mistral/nemo_12b": "mistral/configs/params_mistral_12b",
    "mixtral/mixtral_8x7b": "mixtral/configs/params_mixtral_8x7b",
    "mixtral/mixtral_8x22b": "mixtral/configs/params_mixtral_8x22b",
    "santacoder/santacoder_1b": "santacoder/configs/params_santacoder_1b",
    "starcoder/starcoder_15b": "starcoder/configs/params_starcoder_15b",
    "starcoder/wizardcoder_15b": "starcoder/configs/params_wizardcoder_15b",
}

DIFFERENT = {
    "bloom/bloom_7b1": {"nonlinearity"},  # the checkpoint's is the approximation by tanh
    "gptj/gptj_6b": {"nonlinearity", "vocab_size"},  # likewise, with 50,400 tokens
    "llama/llama3p1_405b": {"extra_attention_params.num_kv_groups"},  # 8, table 3 of the paper
}


@pytest.mark.parametrize("name", PUBLIC)
def test_shipped_models_equal_the_public_ones(name):
    public = load_params(public_params("nlp") / f"{PUBLIC[name]}.yaml").init.model
    ours = decoder_meaning(load_params(find_params(name)).init.model)
    different = {key for key, value in decoder_meaning(public).items() if ours[key] != value}
    assert different == DIFFERENT.get(name, set())
