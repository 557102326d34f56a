"""A run of a very small model, and what to compare of two runs."""

import json
import time

import psutil
import torch

from headwater.trainer.pretrained import checkpoint_weights

PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU, num_slabs: 2}}
    model_dir: {model_dir}
    seed: 3
    model:
      name: gpt2
      vocab_size: 300
      hidden_size: 32
      num_hidden_layers: 2
      num_heads: 2
      max_position_embeddings: 16
      dropout_rate: 0.1
    optimizer:
      AdamW: {{betas: [0.9, 0.95], weight_decay: 0.1}}
    schedulers:
    - LinearLR: {{initial_learning_rate: 1e-2, end_learning_rate: 1e-3, total_iters: 20}}
    precision: {{enabled: false, max_gradient_norm: 1.0}}
    loop: {{max_steps: 6, eval_frequency: 3, eval_steps: 2}}
    checkpoint: {{steps: 3}}
    callbacks:
    - ComputeNorm
  fit:
    train_dataloader: &train
      data_processor: GptHDF5DataProcessor
      data_dir: {data}/train
      batch_size: 8
      shuffle: true
    val_dataloader: &val
      <<: *train
      data_dir: {data}/val
      shuffle: false
  validate:
    val_dataloader: *val
"""

EXACT = ("kind", "step", "loss", "gradient_norm", "learning_rate", "applied", "tokens", "weight_norm")
"""What two equal runs have in common, to the bit."""


def write_params(folder, data, name="run"):
    """A params file whose model_dir is `folder / name`."""
    path = folder / f"{name}.yaml"
    path.write_text(PARAMS.format(model_dir=folder / name, data=data))
    return path


def model_dir(folder):
    """The option that lets a run work in `folder`."""
    return f"--trainer.init.model_dir={folder}"


def history(model_dir):
    """Return the parts of a run's history that must be bit-identical."""
    lines = (model_dir / "history.jsonl").read_text().splitlines()
    return [{key: record.get(key) for key in EXACT} for record in map(json.loads, lines)]


def assert_same_checkpoint(first, second):
    """Two checkpoints have the same weights, to the bit."""
    ours, theirs = dict(checkpoint_weights(first)), dict(checkpoint_weights(second))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def losses(model_dir):
    """The training losses of a run, step after step."""
    return [record["loss"] for record in history(model_dir) if record["kind"] == "train"]


def ranks_of(launcher):
    """The processes of the ranks that a launcher has started, in their order."""
    return sorted(child.pid for child in psutil.Process(launcher.pid).children())


def wait_for(path, seconds=200):
    """Return when there is such a file."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.05)
