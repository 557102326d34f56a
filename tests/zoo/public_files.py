"""The params files of the public Model Zoo, and the same files with small sizes."""

import functools
import json

import yaml

from headwater.config import load_params
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


def model_section(file):
    """Return the section of a file that describes its model."""
    tree = yaml.load((ROOT / file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tree["trainer"]["init"]["model"] if "trainer" in tree else tree["model"]


def small_params(file, model_dir):
    keys = overrides(model_section(file), "trainer.init.model") | {
        "trainer.init.backend": {"backend_type": "CPU", "num_slabs": 2, "micro_batch_size": BATCH},
        "trainer.init.loop": {"max_steps": 2},
        "trainer.init.checkpoint": {},
        "trainer.init.logging": {},
        "trainer.init.precision.fp16_type": "bfloat16",
        "trainer.init.model_dir": str(model_dir),
    }
    return load_params(ROOT / file, keys)


def kinds(value):
    """Return a section with the type of each number in its place."""
    if isinstance(value, dict):
        return {name: kinds(below) for name, below in value.items()}
    if isinstance(value, list):
        return [kinds(below) for below in value]
    return type(value).__name__ if isinstance(value, float | int) and not isinstance(value, bool) else value


@functools.cache
def computation(file):
    """Return the sections of a file with small sizes: of its model, and of its kind of training."""
    init = small_params(file, "run").init.model_dump(mode="json", warnings=False)
    return tuple(json.dumps(part, sort_keys=True) for part in (init.pop("model"), kinds(init)))


def different_files(*, trainings=True):
    """Return files with every model that occurs once sizes are small, and with every kind of training.

    Files whose optimizers and schedules differ only in numbers have the same kind of training.

    Args:
        trainings: look at the kind of training too, and not only at the model.
    """
    seen, found = set(), []
    for file in FILES:
        new = set(computation(file)[: 1 + trainings]) - seen
        seen |= new
        if new:
            found.append(file)
    return found
