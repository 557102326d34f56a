"""The model families that come with the package: each trains with two slabs to the bits of plain PyTorch."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.decoder import FAMILIES as DECODERS
from headwater.config.models.decoder import DecoderConfig
from headwater.models.registry import build_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "max_position_embeddings": 16,
    "rotary_dim": 4,
    "dropout_rate": 0.1,
}
MORE = {
    "falcon": {"extra_attention_params": {"num_kv_groups": 2}},
    "mistral": {"attention_sliding_window_length": 5, "attention_sink_tokens": 2},
    "gemma2": {"attention_sliding_window_length": 5},
    "mixtral": {"moe": {"num_experts": 4, "top_k": 2, "num_shared_experts": 1}},
    "jais": {"alibi_trainable_slopes": True, "mup_base_hidden_size": 8, "mup_base_filter_size": 32},
}  # fmt: skip


def _batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, 61, (2, 17), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": torch.ones(2, 16)}


def job(name):
    config = DecoderConfig.model_validate({"name": name, **SIZES, **MORE.get(name, {})})
    return Job(lambda: build_model(config), _batch, lambda model, batch: model(batch), micro_batches=2)


@functools.cache
def plain(name):
    return train_plain(job(name), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_streamed_model_equals_plain_pytorch(name, setting, tmp_path):
    expected = plain(name)
    assert len(set(expected.losses)) == 3
    assert_equal(train_streamed(job(name), setting, tmp_path, steps=3), expected)
