"""A model of yours with the params files, checkpoints and logs of `headwater fit`.

    python examples/params_own_model.py --params examples/params_own_model.yaml --mode train

The same command again continues the run.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headwater.run import PyTorchBaseModel, run

Params = dict[str, Any]


class Classifier(PyTorchBaseModel):
    """A classifier; the call returns the loss of a batch."""

    def __init__(self, params: Params, device: Any = None) -> None:
        width, depth = params["model"]["width"], params["model"]["depth"]
        blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.model = nn.Sequential(*blocks, nn.Linear(width, 4))
        super().__init__(params=params, model=self.model, device=device)

    def __call__(self, data: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = data
        return nn.functional.cross_entropy(self.model(inputs), labels)


def get_train_dataloader(params: Params) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader of random samples, whose label is the largest of their first four values."""
    inputs = torch.randn(64, params["model"]["width"], generator=torch.Generator().manual_seed(0))
    return DataLoader(
        TensorDataset(inputs, inputs[:, :4].argmax(-1)), batch_size=params["train_input"]["batch_size"]
    )


if __name__ == "__main__":
    run(Classifier, get_train_dataloader)
