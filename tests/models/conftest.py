"""Small models and batches that the model tests share."""

import pytest
import torch

from headwater.config.models.decoder import DecoderConfig

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 24,
    "dropout_rate": 0.0,
    "initializer": {"name": "normal", "std": 0.1},
}


@pytest.fixture
def tiny():
    """Makes the config of a tiny model, with changes."""
    return lambda **changes: DecoderConfig.model_validate({**TINY, **changes})


@pytest.fixture
def batch():
    """Four sequences of 20 tokens; the last ones of two are padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TINY["vocab_size"], (4, 21), generator=generator, dtype=torch.int32)
    mask = torch.ones(4, 20, dtype=torch.int32)
    mask[1, 15:] = 0
    mask[3, 2:] = 0
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": mask}
