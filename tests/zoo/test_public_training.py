"""Every params file of the public Model Zoo trains two steps with smaller sizes and no other change."""

import json

import pytest
import torch
import yaml

from headwater.config import load_params
from headwater.trainer.job import Job
from headwater.trainer.session import fit_job
from headwater.trainer.zoo_job import zoo_trainable
from shared_data import SHARED

ROOT = SHARED / "public_params"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.yaml"))

LENGTH, BATCH = 16, 4
SMALL = {
    "attention_inner_dim": 32,
    "bottleneck_size": 8,
    "attention_sink_tokens": 2,
    "attention_sliding_window_length": 5,
    "d_ff": 48,
    "d_kv": 8,
    "d_model": 32,
    "decoder_num_hidden_layers": 2,
    "encoder_num_hidden_layers": 2,
    "filter_size": 48,
    "hidden_size": 32,
    "image_size": [32, 32],
    "input_unit": 32,
    "latent_size": [8, 8],
    "layers_units": [32, 32],
    "max_position_embeddings": LENGTH,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "output_size": 64,
    "original_max_position_embeddings": 8,
    "patch_size": [4, 4],
    "rotary_dim": 8,
    "src_max_position_embeddings": LENGTH,
    "src_vocab_size": 256,
    "tgt_max_position_embeddings": LENGTH,
    "tgt_vocab_size": 256,
    "vocab_size": 256,
}  # fmt: skip
"""What is written in place of a size."""


def shrunk(value, key=None):
    """Return a section with small sizes."""
    if isinstance(value, dict):
        return {name: shrunk(below, name) for name, below in value.items()}
    if key in SMALL and value is not None:
        return SMALL[key]
    if key == "input_size":  # of a head, or of a loss that reads what a head gives
        return 64 if value > 2000 else 32
    if key == "num_kv_groups":
        return min(value, 2)
    return [shrunk(below) for below in value] if isinstance(value, list) else value


def overrides(section, prefix):
    """Return overrides for the keys of a section that shrinking changes."""
    small = shrunk(section)
    return {f"{prefix}.{key}": small[key] for key in section if small[key] != section[key]}


def small_params(file, model_dir):
    tree = yaml.safe_load((ROOT / file).read_text())
    model = tree["trainer"]["init"]["model"] if "trainer" in tree else tree["model"]
    keys = overrides(model, "trainer.init.model") | {
        "trainer.init.backend": {"backend_type": "CPU", "num_slabs": 2, "micro_batch_size": BATCH},
        "trainer.init.loop": {"max_steps": 2},
        "trainer.init.checkpoint": {},
        "trainer.init.logging": {},
        "trainer.init.precision.fp16_type": "bfloat16",
        "trainer.init.model_dir": str(model_dir),
    }
    return load_params(ROOT / file, keys)


class Synthetic:
    """A data set of random batches with the shapes that a model reads."""

    def __init__(self, example):
        self.example = example

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {name: self._values(name, like, generator) for name, like in self.example.items()}

    @staticmethod
    def _values(name, like, generator):
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator)
        if "mask" in name or "weights" in name:
            return torch.ones(like.shape, dtype=like.dtype)
        limit = 2 if "label" in name or "type" in name else LENGTH
        return torch.randint(0, limit, like.shape, generator=generator)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.skipif(not FILES, reason="the public params files are not here")
@pytest.mark.parametrize("file", FILES)
def test_a_file_trains(file, tmp_path):
    config = small_params(file, tmp_path)
    trainable = zoo_trainable(config.init, LENGTH if "nlp" in file else None)
    data = Synthetic(trainable.example(BATCH))
    result = fit_job(Job(config.init, trainable, data, BATCH))
    assert result.step == 2
    records = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 2
    assert losses[0] != losses[1], "an update changed nothing"
