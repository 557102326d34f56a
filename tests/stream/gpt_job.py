"""A small GPT-2 of the transformers library: tied weights, dropout, activations large enough to offload."""

import functools

import torch
from harness import History, Job, token_batch, train_plain
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 96
SHAPE = (4, 64)


def make_gpt() -> torch.nn.Module:
    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def gpt_loss(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def gpt_job(**options) -> Job:
    batch = functools.partial(token_batch, vocabulary=VOCABULARY, shape=SHAPE)
    return Job(make_gpt, batch, gpt_loss, **options)


@functools.cache
def plain_gpt(steps: int, micro_batches: int = 1) -> History:
    """Return the history of `gpt_job` in plain PyTorch."""
    return train_plain(gpt_job(micro_batches=micro_batches), steps=steps)
