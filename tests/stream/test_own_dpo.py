"""Preference training: a policy and its frozen reference stream to the bits of plain PyTorch."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.preference import DPOConfig
from headwater.models.registry import build_model

POLICY = {
    "name": "mistral",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 16,
    "attention_sliding_window_length": 5,
    "dropout_rate": 0.1,
}


def _batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    batch = {}
    for side in ("chosen", "rejected"):
        ids = torch.randint(0, 61, (2, 16), generator=generator)
        batch |= {f"{side}_input_ids": ids, f"{side}_labels": ids.clone()}
        batch[f"{side}_labels"][:, :5] = -100
    return batch


ADAPTERS = {"lora_params": {"r": 2, "alpha": 4.0, "dropout": 0.1}}


def job(kind):
    policy = POLICY | (ADAPTERS if kind == "adapters" else {})
    section = {"name": "dpo", "policy_model": policy, "dpo": {"disable_dropout": kind == "whole"}}
    config = DPOConfig.model_validate(section)
    return Job(lambda: build_model(config), _batch, lambda model, batch: model(batch), micro_batches=2)


@functools.cache
def plain(kind):
    return train_plain(job(kind), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("kind", ["whole", "dropout", "adapters"])
def test_a_streamed_model_equals_plain_pytorch(kind, setting, tmp_path):
    expected = plain(kind)
    assert len(set(expected.losses)) == 3
    assert_equal(train_streamed(job(kind), setting, tmp_path, steps=3), expected)
