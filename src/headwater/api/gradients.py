"""Functions on the gradients of an optimizer: unscale them, and test whether all are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headwater.api.stored_state import params_of


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of an optimizer's parameters; parameters without a gradient are left out."""
    return [gradient for param in params_of(optimizer) if (gradient := param.grad) is not None]


def unscale(gradients: Iterable[torch.Tensor], scale: float) -> None:
    """Divide gradients in place by the factor with which the loss was multiplied."""
    if scale != 1.0:
        for gradient in gradients:
            # torch's scaler multiplies too. A division rounds differently if the scale is not a power of two.
            gradient.mul_(1.0 / scale)


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return true if every element of every gradient is finite."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients)
