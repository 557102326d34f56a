"""Helpers for the tests of conversions."""

import torch
from safetensors.torch import load_file


def stored(folder):
    """Return all tensors of a checkpoint, in one file or several."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def losses_of_a_step(module, loss, learning_rate=1e-3):
    """Return the loss before and after one step of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, foreach=False)
    before = loss()
    before.backward()
    optimizer.step()
    return torch.stack([before.detach(), loss().detach()])
