"""Weights that are read from disk while a model generates text: each stage once per token."""

import pytest
import torch
from harness import Job, Setting, make_engine

from headwater.config.models.decoder import DecoderConfig
from headwater.generation.generate import generate
from headwater.models.decoder import Decoder

NEW_TOKENS = 6


def decoder():
    section = {
        "vocab_size": 97,
        "hidden_size": 16,
        "num_hidden_layers": 6,
        "num_heads": 2,
        "max_position_embeddings": 24,
    }
    return Decoder(DecoderConfig.model_validate(section), seed=1)


def job():
    tokens = torch.arange(12).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    return Job(decoder, lambda step, index: batch, lambda model, batch: model(batch))


@pytest.mark.parametrize("setting", [Setting("disk", 2), Setting("disk", 3)], ids=str)
def test_each_stage_is_read_once_per_token(setting, tmp_path, monkeypatch):
    with make_engine(job(), setting, tmp_path) as engine:
        engine.model.eval()
        reads, fetch = [], engine.store.fetch

        def counted(stage, *arguments):
            reads.append(stage)
            return fetch(stage, *arguments)

        monkeypatch.setattr(engine.store, "fetch", counted)
        prompt = torch.arange(5).view(1, 5)
        with engine.inference():
            found = generate(engine.model, prompt, NEW_TOKENS, temperature=0)
        stages = len(engine.plan.trace.stages)
    assert torch.equal(found, generate(decoder().eval(), prompt, NEW_TOKENS, temperature=0))
    # One more pass: the next token's stages are fetched ahead.
    assert len(reads) <= stages * (NEW_TOKENS + 1)
