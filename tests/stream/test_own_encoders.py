"""The encoders of the package: each trains with two slabs to the bits of plain PyTorch."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.encoder import BertConfig
from headwater.models.registry import build_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "filter_size": 48,
    "max_position_embeddings": 16,
}


def _linformer(sharing):
    params = {"projected_length": 5, "sharing": sharing}
    return {"name": "bert", "attention_module": "linformer", "extra_attention_params": params}


CASES = {
    "bert": {"name": "bert"},
    "esm2": {"name": "esm2", "position_embedding_type": "rotary", "mask_token_id": 3},
    "linformer": _linformer("layerwise"),
    "linformer-headwise": _linformer("headwise"),
    "linformer-key-value": _linformer("key_value"),
}


def _batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens = torch.randint(0, 61, (2, 16), generator=generator)
    text = torch.ones_like(tokens)
    text[1, 11:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": text,
        "token_type_ids": (torch.arange(16) > 6).long().expand(2, 16),
        "masked_lm_positions": torch.randint(0, 11, (2, 3), generator=generator),
        "masked_lm_ids": torch.randint(0, 61, (2, 3), generator=generator),
        "masked_lm_weights": torch.ones(2, 3),
        "next_sentence_label": torch.randint(0, 2, (2,), generator=generator),
    }


def job(name):
    config = BertConfig.model_validate({**SIZES, **CASES[name]})
    return Job(lambda: build_model(config), _batch, lambda model, batch: model(batch), micro_batches=2)


@functools.cache
def plain(name):
    return train_plain(job(name), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_streamed_model_equals_plain_pytorch(name, setting, tmp_path):
    expected = plain(name)
    assert len(set(expected.losses)) == 3
    assert_equal(train_streamed(job(name), setting, tmp_path, steps=3), expected)
