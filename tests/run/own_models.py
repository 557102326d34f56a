"""Models, losses and data as a user would write them; also a script that runs one of them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from headwater.metrics import AccuracyMetric, MeanMetric
from headwater.run import PyTorchBaseModel, run
from headwater.trainer.pretrained import checkpoint_weights

SHARED = Path(os.environ.get("HEADWATER_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
MNIST = SHARED / "data" / "mnist"

PARAMS = """\
train_input:
  num_examples: 64
  batch_size: 8
  shuffle: true
eval_input:
  num_examples: 20
  batch_size: 8
model:
  widths: [24, 24, 24]
  dropout: 0.1
optimizer:
  optimizer_type: AdamW
  learning_rate: 0.01
  weight_decay: 0.1
  max_gradient_norm: 1.0
runconfig:
  target_device: CPU
  max_steps: 6
  checkpoint_steps: 3
  log_steps: 1
  eval_frequency: 3
  seed: 5
"""

STREAMED = ("--trainer.init.backend.num_slabs", "2")


class MLP(nn.Module):
    def __init__(self, inputs, widths, classes, dropout):
        super().__init__()
        sizes = [inputs, *widths]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(dropout))
            for a, b in itertools.pairwise(sizes)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images):
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Classifier(PyTorchBaseModel):
    def __init__(self, params, device=None):
        keys = params["model"]
        self.model = MLP(
            keys.get("inputs", 12), keys["widths"], keys.get("classes", 4), keys.get("dropout", 0.0)
        )
        self.loss_fn = nn.CrossEntropyLoss()
        self.accuracy = AccuracyMetric(name="accuracy")
        self.by_hand = {"mean_loss": MeanMetric(name="mean_loss")}
        super().__init__(params=params, model=self.model, device=device)

    def __call__(self, data):
        images, labels = data
        outputs = self.model(images)
        loss = self.loss_fn(outputs, labels)
        if not self.model.training:
            self.accuracy(labels=labels, predictions=outputs.argmax(1))
            self.by_hand["mean_loss"](loss.detach().expand(len(labels)))
        return loss


def clusters(count, seed):
    """Points around four corners, and which corner."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    corners = torch.randn(4, 12, generator=torch.Generator().manual_seed(99))
    return corners[labels] + 0.5 * torch.randn(count, 12, generator=generator), labels


class Jittered(Dataset):
    """A data set that adds new random noise each time a sample is read."""

    def __init__(self, points, labels):
        self.points, self.labels = points, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        noise = torch.rand(12) + float(np.random.rand())
        return self.points[index] + 0.1 * noise, self.labels[index]


def get_train_dataloader(params):
    keys = params["train_input"]
    return DataLoader(
        Jittered(*clusters(keys["num_examples"], 1)),
        batch_size=keys["batch_size"],
        shuffle=keys["shuffle"],
        drop_last=keys.get("drop_last", False),
        num_workers=keys.get("num_workers", 0),
    )


def get_eval_dataloader(params):
    keys = params["eval_input"]
    return DataLoader(TensorDataset(*clusters(keys["num_examples"], 2)), batch_size=keys["batch_size"])


def read_mnist(name, count):
    """The first images [count, 28, 28] in [0, 1] and labels of a part of MNIST."""
    images = gzip.decompress((MNIST / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((MNIST / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = np.frombuffer(images, np.uint8)[: count * 784].reshape(count, 28, 28)
    return torch.from_numpy(pixels / np.float32(255)), torch.tensor(list(labels[:count]))


def write_params(folder, name="run", text=PARAMS):
    """A params file whose model_dir is `folder / name`."""
    path = folder / f"{name}.yaml"
    path.write_text(f"{text}  model_dir: {folder / name}\n")
    return path


EXACT = ("kind", "step", "loss", "gradient_norm", "learning_rate", "applied", "samples", "metrics")
"""What two equal runs have in common, to the bit."""


def history(model_dir):
    """Return the parts of a run's history that must be bit-identical."""
    lines = (model_dir / "history.jsonl").read_text().splitlines()
    return [{key: record.get(key) for key in EXACT} for record in map(json.loads, lines)]


def assert_equal_checkpoints(first, second):
    """Two checkpoints have the same weights, to the bit."""
    ours, theirs = dict(checkpoint_weights(first)), dict(checkpoint_weights(second))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


if __name__ == "__main__":
    run(Classifier, get_train_dataloader, get_eval_dataloader)
