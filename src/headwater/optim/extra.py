"""Lamb and Lion, two optimizers that torch does not have.

They update each parameter independently and in place, and keep all state of a parameter in `state[param]`.
Therefore the streaming engine can run them on one parameter at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT

from headwater.core.errors import ConfigError


class _PerParameter(torch.optim.Optimizer, abc.ABC):
    """An optimizer that updates one parameter at a time."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes and returns the loss, as in torch.

        Returns:
            The loss from `closure`, or `None` without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    @abc.abstractmethod
    def _update(
        self, param: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Change `param` and `state` in place."""


class Lion(_PerParameter):
    """Evolved sign momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675).

    Every element changes by the learning rate, against the sign of
    `betas[0] * momentum + (1 - betas[0]) * gradient`; then the momentum becomes
    `betas[1] * momentum + (1 - betas[1]) * gradient`. State: one tensor of the parameter's shape.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate; the paper recommends a third to a tenth of AdamW's.
        betas: weight of the momentum in the step, and decay of the momentum.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Raises:
        ConfigError: if an argument is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        _check("Lion", lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update(
        self, param: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        step_beta, momentum_beta = group["betas"]
        momentum = state["exp_avg"]
        # A new tensor: the momentum changes only after the step, and with its own beta.
        direction = (momentum * step_beta).add_(gradient, alpha=1 - step_beta).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        momentum.mul_(momentum_beta).add_(gradient, alpha=1 - momentum_beta)


class Lamb(_PerParameter):
    """Layer-wise adaptive Adam (You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962).

    Adam's step with decoupled weight decay is scaled for each parameter, so that the norm of the step is the
    learning rate times the norm of the parameter. It is not scaled if one of the norms is 0. State: two
    tensors of the parameter's shape and a step count.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        betas: decay of the averages of the gradient and the squared gradient.
        eps: added to the square root of the average squared gradient.
        weight_decay: decoupled weight decay; added to the step before it is scaled.
        adam: true to skip the scaling, which makes it AdamW.

    Raises:
        ConfigError: if an argument is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        _check("Lamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "adam": adam}
        super().__init__(params, defaults)

    def _update(
        self, param: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        # A Python number, as in torch: with a tensor the powers of the betas would be computed in fp32.
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = (mean / (1 - beta1**step)).div_(denominator).add_(param, alpha=group["weight_decay"])
        if not group["adam"]:
            direction.mul_(_trust_ratio(param, direction))
        param.add_(direction, alpha=-group["lr"])


def _trust_ratio(param: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the norm of `param` divided by the norm of `direction`; 1 if either is 0."""
    ours, theirs = torch.linalg.vector_norm(param), torch.linalg.vector_norm(direction)
    return torch.where((ours > 0) & (theirs > 0), ours / theirs, torch.ones_like(ours))


def _check(name: str, *, betas: tuple[float, float], **others: float) -> None:
    # `not ... >=` instead of `<`, so that NaN is wrong too.
    wrong = [f"expected {key} >= 0, got {value}" for key, value in others.items() if not value >= 0]
    wrong += [f"expected betas >= 0 and < 1, got {betas}"] * any(not 0 <= b < 1 for b in betas)
    if wrong:
        raise ConfigError(f"{name}: {wrong[0]}", remedy="change this argument of the optimizer")
