"""Shipped params files: their models have the published sizes, and can be traced."""

import functools
import math

import pytest
import torch

from headwater.config import find_params, load_params, shipped_params
from headwater.config.models.vision import FCMnistConfig, ImageEncoderSection, UNetConfig
from headwater.convert.formats import FORMATS, format_of_config
from headwater.plan.trace import trace_step
from headwater.trainer.zoo_job import meta_model, zoo_trainable

CHECKPOINT = "its public checkpoint"
BERT, T5, LLAMA, LLAMA3 = (
    "arXiv:1810.04805",
    "arXiv:1910.10683",
    "arXiv:2302.13971, table 2",
    "arXiv:2407.21783",
)
BLOOM, GEMMA2, VIT = "its model card", "arXiv:2408.00118, table 2", "arXiv:2010.11929, table 1"

PUBLISHED = {
    "bert/base": (110e6, BERT),
    "bert/large": (336e6, CHECKPOINT),
    "bloom/bloom_560m": (559_214_592, BLOOM),
    "bloom/bloom_1b1": (1_065_314_304, BLOOM),
    "bloom/bloom_1b7": (1_722_408_960, BLOOM),
    "bloom/bloom_3b": (3_002_557_440, BLOOM),
    "bloom/bloom_7b1": (7_069_016_064, BLOOM),
    "bloom/bloom_176b": (176_247_271_424, BLOOM),
    "btlm/btlm_3b": (2.65e9, CHECKPOINT),
    "codegen/codegen_350m": (357e6, CHECKPOINT),
    "codegen/codegen_2b": (2.78e9, CHECKPOINT),
    "codegen/codegen_6b": (7.07e9, CHECKPOINT),
    "codegen/codegen_16b": (16.1e9, "arXiv:2203.13474"),
    "dpo/zephyr_7b": (2 * 7.24e9, "Mistral's model card; policy and reference"),
    "dpr/base": (2 * 109.5e6, "two of BERT base"),
    "esm2/esm2_8m": (7.84e6 - 1026 * 320, CHECKPOINT + " without positions that are not read"),
    "esm2/esm2_35m": (34.0e6 - 1026 * 480, CHECKPOINT + " without positions that are not read"),
    "esm2/esm2_150m": (149e6, CHECKPOINT),
    "esm2/esm2_650m": (652e6, CHECKPOINT),
    "esm2/esm2_3b": (2.84e9, CHECKPOINT),
    "esm2/esm2_15b": (15.1e9, CHECKPOINT),
    "falcon/falcon_7b": (6.92e9, CHECKPOINT),
    "falcon/falcon_40b": (41.3e9, CHECKPOINT),
    "falcon/falcon_180b": (178.6e9, CHECKPOINT),
    "gemma2/gemma2_2b": (590e6 + 2_024e6, GEMMA2),
    "gemma2/gemma2_9b": (918e6 + 8_324e6, GEMMA2),
    "gemma2/gemma2_27b": (1_180e6 + 26_047e6, GEMMA2),
    "gpt/175b": (175e9, "arXiv:2005.14165, table 2.1"),
    "gpt/gpt2_small": (124e6, "the README of GPT-2"),
    "gpt/gpt2_medium": (355e6, "the README of GPT-2"),
    "gpt/gpt2_large": (774e6, "the README of GPT-2"),
    "gpt/gpt2_xl": (1_558e6, "the README of GPT-2"),
    "gpt_neox/gpt_neox_20b": (20_554_567_680, "arXiv:2204.06745, table 1"),
    "gptj/gptj_6b": (6_053_381_344, "its model card"),
    "jais/jais_13b": (13.0e9, "arXiv:2308.16149"),
    "jais/jais_30b": (30e9, "its model card"),
    "llama/llama1_7b": (6.7e9, LLAMA),
    "llama/llama1_13b": (13.0e9, LLAMA),
    "llama/llama1_33b": (32.5e9, LLAMA),
    "llama/llama1_65b": (65.2e9, LLAMA),
    "llama/llama2_7b": (6.74e9, CHECKPOINT),
    "llama/llama2_13b": (13.0e9, CHECKPOINT),
    "llama/llama2_70b": (69.0e9, CHECKPOINT),
    "llama/code_llama_7b": (6.74e9, CHECKPOINT),
    "llama/code_llama_13b": (13.0e9, CHECKPOINT),
    "llama/code_llama_34b": (33.7e9, CHECKPOINT),
    "llama/code_llama_70b": (69.0e9, CHECKPOINT),
    "llama/llama3p1_8b": (8.03e9, CHECKPOINT),
    "llama/llama3p1_70b": (70.6e9, CHECKPOINT),
    "llama/llama3p1_405b": (405e9, LLAMA3),
    "llama/llama3p2_1b": (1.23e9, "its model card"),
    "llama/llama3p2_3b": (3.21e9, "its model card"),
    "llama/llama3p3_70b": (70.6e9, CHECKPOINT),
    "llama/wizardlm_13b": (13.0e9, CHECKPOINT),
    "mistral/mistral_7b": (7.24e9, "its model card"),
    "mistral/nemo_12b": (12.2e9, "its model card"),
    "mixtral/mixtral_8x7b": (46.7e9, "its announcement"),
    "mixtral/mixtral_8x22b": (141e9, "its model card"),
    "mpt/mpt_7b": (6.7e9, "its model card"),
    "mpt/mpt_30b": (30.0e9, "its model card"),
    "roberta/base": (125e6, "arXiv:1907.11692"),
    "roberta/large": (355e6, "arXiv:1907.11692"),
    "santacoder/santacoder_1b": (1.12e9, CHECKPOINT),
    "starcoder/starcoder_15b": (15.5e9, "arXiv:2305.06161"),
    "starcoder/wizardcoder_15b": (15.5e9, "arXiv:2305.06161"),
    "starcoder/sqlcoder_15b": (15.5e9, "arXiv:2305.06161"),
    "starcoder/octocoder_15b": (15.5e9, "arXiv:2305.06161; adapters are few"),
    "t5/small": (60.5e6, CHECKPOINT),
    "t5/base": (223e6, CHECKPOINT),
    "t5/large": (738e6, CHECKPOINT),
    "t5/3b": (2.85e9, CHECKPOINT),
    "t5/11b": (11.3e9, CHECKPOINT),
    "t5/v1p1_small": (77.0e6, CHECKPOINT),
    "t5/v1p1_base": (248e6, CHECKPOINT),
    "t5/v1p1_large": (783e6, CHECKPOINT),
    "t5/v1p1_xl": (2.85e9, CHECKPOINT),
    "t5/v1p1_xxl": (11.1e9, CHECKPOINT),
    "t5/ul2_20b": (19.5e9, CHECKPOINT),
    "transformer/large": (213e6, "arXiv:1706.03762, table 3"),
    "vit/base": (86e6, VIT),
    "vit/large": (307e6, VIT),
    "vit/huge": (632e6, VIT),
}
"""Parameters of models, and who says so."""

UNPUBLISHED = {
    "bert/base_mnli", "bert/base_ner", "bert/base_sst2", "bert/base_summarization", "bert/large_mnli",
    "bert/large_sst2", "bert/large_summarization",
    "bert/base_squad", "bert/large_squad",  # BERT with another head
    "btlm/btlm_3b_8k", "mnist/fc_mnist", "transformer/base", "unet/isbi",
    "roberta/linformer_base",  # RoBERTa with another attention
}  # fmt: skip
ELSEWHERE = ("dino/", "dit/", "gpt/cerebras", "llava/", "multimodal_simple/")
"""Files that other tests count."""


def full_size():
    """Return the names of the files with models of published sizes, without the small test models."""
    return [name for name in shipped_params() if "tiny" not in name and not name.startswith(ELSEWHERE)]


@functools.cache
def params(name):
    return load_params(find_params(name))


def count(model):
    return sum(value.numel() for value in model.parameters())


@functools.cache
def size(name):
    return count(meta_model(params(name).init.model))


TRACED = {"starcoder": "starcoder/starcoder_15b", "transformer": "transformer/base"}
"""By folder, where the published numbers do not name the smallest model."""


def smallest():
    """Return the file with the smallest model of each folder."""
    names = sorted(full_size(), key=lambda name: PUBLISHED.get(name, (math.inf,))[0])
    return sorted(({name.split("/")[0]: name for name in reversed(names)} | TRACED).values())


def test_every_file_has_a_known_size():
    assert set(full_size()) == PUBLISHED.keys() | UNPUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_number_of_parameters(name):
    assert size(name) == pytest.approx(PUBLISHED[name][0], rel=0.01)


@pytest.mark.parametrize(
    ("name", "published"),
    [("small", 22_056_576), ("base", 86_580_480), ("large", 304_368_640), ("giant", 1_136_480_768)],
)
def test_encoders_of_dinov2_have_the_parameters_of_the_public_checkpoints(name, published):
    """The public checkpoints have positions for images of 518 x 518."""
    config = params(f"dino/dinov2_{name}").init.model
    model = meta_model(config)
    width = model.image_model_trunks.model[0].class_token.weight.shape[-1]
    more_positions = ((518 // 14) ** 2 - (224 // 14) ** 2) * width
    for trunk in model.image_model_trunks.model:
        assert count(trunk) + more_positions == published


def test_the_first_transformer_has_the_layers_of_torch():
    model = params("transformer/base").init.model
    with torch.device("meta"):
        theirs = torch.nn.Transformer(
            model.d_model, model.num_heads, model.encoder_num_hidden_layers, 6, model.d_ff, batch_first=True
        )
    biases = 3 * 6 * 4 * model.d_model  # biases of the attention, which this model does not have
    assert size("transformer/base") == count(theirs) - biases + model.src_vocab_size * model.d_model


UNREAD = (
    "esm.embeddings.position_embeddings.weight",
    "contact_head.regression.weight",
    "contact_head.regression.bias",
)
"""How names of parameters end that take no part in the loss of a class there."""


WITHOUT_CLASS = {"btlm", "jais", "transformer"}
"""Models for which the library has no class.

The checkpoints of the first two bring their own; the first transformer has norms behind its layers, and
Pegasus has them before.
"""


def with_format():
    """Return the names of the smallest models whose class exists in the transformers library."""
    known = {name for format in FORMATS for name in format.models} - WITHOUT_CLASS
    return [name for name in smallest() if params(name).init.model.name in known]


@pytest.mark.parametrize("name", with_format())
def test_parameter_counts_equal_those_of_the_transformers_library(name):
    transformers = pytest.importorskip("transformers")
    model = params(name).init.model
    format = format_of_config(model)
    counted = 0
    for config in format.by_folder(format.config_to_hf(model)).values():
        theirs = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            module = theirs(theirs.config_class(**config))
        unread = sum(value.numel() for key, value in module.named_parameters() if key.endswith(UNREAD))
        counted += count(module) - unread
    assert counted == size(name)


@pytest.mark.parametrize("name", smallest())
def test_a_model_is_traced_at_full_size(name):
    init = params(name).init
    of_images = isinstance(init.model, FCMnistConfig | ImageEncoderSection | UNetConfig)
    trainable = zoo_trainable(init, None if of_images else 64)
    trace = trace_step(
        trainable.model, trainable.example(1), init.precision.precision, loss_function=trainable.loss
    )
    assert sum(stage.numel for stage in trace.stages) == size(name)


@pytest.mark.parametrize("name", full_size())
def test_learning_rates_fall_by_the_end_of_a_run(name):
    init = params(name).init
    end = init.loop.end_step(0)
    rates = [init.schedule.value(step) for step in (*range(0, end, max(1, end // 200)), end)]
    assert 0 < max(rates) < 0.05
    assert rates[-1] <= max(rates) / 2 or len(set(rates)) == 1
