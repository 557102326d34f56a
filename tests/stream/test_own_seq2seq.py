"""The encoder-decoders of the package: each trains with two slabs to the bits of plain PyTorch."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, train_plain, train_streamed

from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.models.registry import build_model

SIZES = {
    "src_vocab_size": 51,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "encoder_num_hidden_layers": 2,
    "src_max_position_embeddings": 14,
    "tgt_max_position_embeddings": 10,
    "mlm_loss_scaling": "num_masked",
}
CASES = {
    "t5": {"name": "t5", "extra_ids": 10},
    "t5-1.1": {"name": "t5", "encoder_nonlinearity": "geglu_new", "share_embedding_weights": False},
    "transformer": {"name": "transformer", "label_smoothing": 0.1},
    "transformer-two-vocabularies": {
        "name": "transformer",
        "tgt_vocab_size": 40,
        "share_encoder_decoder_embedding": False,
    },
}


def _batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    source = torch.randint(0, 40, (2, 14), generator=generator)
    target = torch.randint(0, 40, (2, 11), generator=generator)
    text = torch.ones_like(source)
    text[1, 9:] = 0
    labels = target[:, 1:].clone()
    labels[0, 7:] = -100
    return {
        "input_ids": source, "attention_mask": text, "decoder_input_ids": target[:, :-1], "labels": labels,
    }  # fmt: skip


def job(name):
    config = Seq2SeqConfig.model_validate({**SIZES, **CASES[name]})
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
