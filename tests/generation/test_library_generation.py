"""Greedy tokens of transformers' models that read several texts at once, compared with the library's own."""

import pytest
import torch

from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.core.effects import effects_undone
from headwater.core.errors import ConfigError
from headwater.generation.batcher import Batcher
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Sampling
from headwater.models.huggingface import HuggingFaceModel

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "llama": GROUPED,
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 5},
    "opt": {**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 40},
    "bloom": {"vocab_size": 61, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "gpt_neo": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 5,
        "max_position_embeddings": 64,
    },
    "mamba": {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
SIDE_BY_SIDE = ("gpt2", "llama", "qwen2", "gemma2", "opt")
PROMPTS = [[5, 17, 3, 44, 9, 21, 8, 2, 13], [7], [30, 31, 32, 33]]


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    config = transformers.AutoConfig.for_model(
        request.param, **FAMILIES[request.param], bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = HuggingFaceModel(HuggingFaceConfig.model_validate({"name": "hf", "hf": tmp_path}))
    ours.hf.load_state_dict(theirs.state_dict())
    return request.param, ours.eval(), theirs


def test_greedy_tokens_equal_those_of_the_library(model):
    family, ours, theirs = model
    expected = [
        theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    batcher = Batcher(ours, "cpu", Limits(100, 5, 3))
    found = []
    for prompt in PROMPTS:  # the requests join at different times
        found.append(batcher.add(GenerationRequest(tuple(prompt), 12, Sampling(0))))
        batcher.step()
    batcher.run()
    assert [each.output for each in found] == expected
    assert hasattr(ours.new_cache(4), "layers") == (family in SIDE_BY_SIDE)
    assert ours.hf.config._attn_implementation == theirs.config._attn_implementation


def test_the_attention_is_known_after_a_first_run_that_was_undone(model):
    family, ours, _ = model
    if family != "gpt2":
        return

    def generate():
        batcher = Batcher(ours, "cpu", Limits(100, 5, 3))
        batcher.add(GenerationRequest((1, 2), 3))
        batcher.run()

    transformers.AttentionInterface._global_mapping.pop("headwater_side_by_side", None)
    with effects_undone(ours):  # as in the dry run of a planner
        generate()
    generate()


def test_attention_with_unknown_tensors_is_refused(model, monkeypatch):
    family, ours, _ = model
    if family != "llama":
        return
    attention = type(ours.hf.model.layers[0].self_attn)
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: forward(*a, **k, position_bias=torch.zeros(1)))
    batcher = Batcher(ours, "cpu", Limits(100, 5, 3))
    batcher.add(GenerationRequest((1, 2), 3))
    with pytest.raises(ConfigError, match="its attention uses position_bias"):
        batcher.run()
