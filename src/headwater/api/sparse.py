"""Sparse training in a user's loop: sparsity optimizers apply masks to weights, and change the masks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.api import transaction
from headwater.api.gradients import are_finite
from headwater.api.step_hooks import amend_with
from headwater.api.stored_state import params_of
from headwater.core.errors import ConfigError
from headwater.optim.catalog import optimizers, require_elementwise
from headwater.sparsity.schedules import Cadence, Constant, Cosine, Cubic, Exponential, Linear, Power, Value
from headwater.sparsity.sparsifier import Algorithm, Sparsifier, Sparsity
from headwater.store.pruning import clear_state
from headwater.stream.parameters import ParameterAtRest

__all__ = [
    "Cadence",
    "Constant",
    "Cosine",
    "Cubic",
    "Exponential",
    "GMPSparsityOptimizer",
    "Linear",
    "Power",
    "RigLSparsityOptimizer",
    "SETSparsityOptimizer",
    "SparsityOptimizer",
    "StaticSparsityOptimizer",
]


class SparsityOptimizer:
    """Keeps masked weights at zero, while any elementwise optimizer of torch trains the others.

    After the first `apply_sparsity`, every optimizer step sets the gradients of masked weights to zero.
    At the steps of `schedule` the mask changes. This happens at the beginning of the optimizer's step, when
    all gradients are known, and the optimizer state of masked and of new weights is set to zero.

    Args:
        named_parameters: names and parameters, as from `model.named_parameters()`.
        sparsity: fraction of the elements that are zero: a number, or a function of the step.
        schedule: number of steps from one change of the mask to the next, or a `Cadence`.
        drop_fraction: fraction of the weights that are exchanged at a change: a number, or a function of the
            step.
        init_method: how the first mask is made: `random`, `topk`, `from_zeros` or `checkerboard`.
        param_filter: patterns of names; all matrices except embeddings and heads if not given.
        seed: seed of random masks.

    Raises:
        ConfigError: if no parameter matches `param_filter`, or the schedule is missing.
    """

    algorithm: Algorithm = "static"

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        sparsity: float | Value,
        schedule: int | Cadence | None = None,
        *,
        drop_fraction: float | Value = 0.3,
        init_method: str = "random",
        param_filter: str | Iterable[str] = (),
        seed: int = 0,
    ) -> None:
        if self.algorithm != "static" and schedule is None:
            raise ConfigError(
                "expected schedule to be a number of steps between two changes of the mask, got None",
                where=type(self).__name__,
                remedy="pass schedule, for example schedule=1000",
            )
        self._parameters = {name: param for name, param in named_parameters if param.requires_grad}
        shapes = {name: param.shape for name, param in self._parameters.items()}
        patterns = (param_filter,) if isinstance(param_filter, str) else tuple(param_filter)
        cadence = Cadence(schedule) if isinstance(schedule, int) else schedule
        group = Sparsity(
            _by_step(sparsity), self.algorithm, init_method, _by_step(drop_fraction), cadence, patterns
        )
        self._sparsifier = Sparsifier([group], shapes, seed=seed)
        self._begun = False
        self._step = 0
        self._in_step: _Parameters | None = None
        self._before: tuple[int, bool, dict[str, Any]] = (0, False, {})
        self._cleared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        for param in self._parameters.values():
            amend_with(param, self)
        # After the stores: if this object wrote weights back first, the stores would then undo that too.
        transaction.register(self, undone_last=True)

    def apply_sparsity(self) -> None:
        """Make the first masks and set masked weights to zero. Later calls do nothing."""
        if not self._begun:
            weights = self._weights(None)
            for name in self._sparsifier.names:
                mask = self._sparsifier.begin(name, weights.read(name))
                weights.prune(name, mask, mask)
            self._begun = True

    def _weights(self, optimizer: torch.optim.Optimizer | None) -> _Parameters:
        before = {} if self._in_step is None else self._in_step.before
        weights = _Parameters(self._parameters, optimizer, before, remember=self._in_step is not None)
        if self._in_step is not None:
            self._in_step = weights
        return weights

    def step(self) -> None:
        """Count a finished training step."""
        self._step += 1

    def sparsity_of(self, name: str) -> float:
        """Return the fraction of a parameter's elements that are masked."""
        self.apply_sparsity()
        return self._sparsifier.sparsity_of(name)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mask the gradients before a step of `optimizer`; at steps of the schedule first change the masks.

        Raises:
            ConfigError: if the optimizer is not elementwise.
        """
        if not self._begun:
            return
        own = {id(param): name for name, param in self._parameters.items() if name in self._sparsifier.names}
        given = [
            (own[id(param)], gradient)
            for param in params_of(optimizer)
            if id(param) in own and (gradient := param.grad) is not None
        ]
        kind = type(optimizer).__name__
        if given and kind in optimizers():  # the update rule of a user's own class is not known
            require_elementwise(kind)
        changing = self._sparsifier.changing(self._step + 1)
        if changing and not are_finite(gradient for _, gradient in given):
            return  # a later check raises or skips this step, so the masks must not change
        weights = self._weights(optimizer)
        with torch.no_grad():
            for name, gradient in given:
                if optimizer not in self._cleared:  # its state may be from training without masks
                    weights.clear(name, self._sparsifier.mask_of(name))
                if name in changing:
                    weight = weights.read(name)
                    gradient_on_cpu = functools.partial(gradient.to, weight.device)
                    kept = self._sparsifier.change(name, weight, gradient_on_cpu, self._step + 1)
                    weights.prune(name, self._sparsifier.mask_of(name), kept)
                # After the change of the mask, so that the new mask is applied.
                gradient.mul_(self._sparsifier.mask_of(name).to(gradient.device))
        if given:
            self._cleared.add(optimizer)

    # a step as a transaction

    def begin_step(self) -> None:
        self._before = self._step, self._begun, self._sparsifier.state_dict()
        self._in_step = _Parameters(self._parameters, None, {}, remember=True)

    def end_step(self) -> None:
        self._in_step = None

    def abort_step(self) -> None:
        changed, self._in_step = self._in_step, None
        self._step, self._begun, masks = self._before
        if self._begun:
            self._sparsifier.load_state_dict(masks)
        if changed is not None:
            for name, weight in changed.before.items():
                changed.write(name, weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the step."""
        return {"step": self._step, "masks": self._sparsifier.state_dict() if self._begun else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore masks and step from `state_dict`.

        The weights are not masked again: load the weights of the same checkpoint.

        Raises:
            CheckpointError: if the sparse parameters differ from those in `state`.
        """
        if state["masks"] is not None:
            self._sparsifier.load_state_dict(state["masks"])
        self._step, self._begun = state["step"], state["masks"] is not None


class StaticSparsityOptimizer(SparsityOptimizer):
    """A sparsity optimizer that never changes its first masks."""


class GMPSparsityOptimizer(SparsityOptimizer):
    """A sparsity optimizer that masks more of the smallest weights over time (arXiv:1710.01878)."""

    algorithm = "gmp"


class SETSparsityOptimizer(SparsityOptimizer):
    """A sparsity optimizer that replaces the smallest weights by random ones (arXiv:1707.04780)."""

    algorithm = "set"


class RigLSparsityOptimizer(SparsityOptimizer):
    """A sparsity optimizer that replaces the smallest weights by those with the largest gradients.

    The method is RigL (arXiv:1911.11134).
    """

    algorithm = "rigl"


class _Parameters:
    """Reads and writes parameters of a model, whether it is streamed or not.

    Attributes:
        before: the weights before the first change, by name, if they are remembered.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        before: dict[str, Tensor],
        *,
        remember: bool,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._remember = remember
        self.before = before

    def read(self, name: str) -> Tensor:
        """Return a copy of the weight, fp32 on the CPU."""
        param = self._parameters[name]
        if isinstance(param, ParameterAtRest):
            return param.home.store.parameters.read_param(param.home.key)
        # Without `clone` an fp32 weight on the CPU would be returned itself, and change with the parameter.
        return param.detach().float().cpu().clone()

    def prune(self, name: str, mask: Tensor, kept: Tensor) -> None:
        """Set the weight to zero where `mask` is false, and its optimizer state where `kept` is false."""
        self.write(name, self.read(name) * mask)
        self.clear(name, kept)

    def write(self, name: str, weight: Tensor) -> None:
        """Replace the weight."""
        param = self._parameters[name]
        if self._remember and name not in self.before:
            self.before[name] = self.read(name)
        if isinstance(param, ParameterAtRest):
            param.home.store.parameters.write_param(param.home.key, weight)
        else:
            with torch.no_grad():
                param.copy_(weight)

    def clear(self, name: str, kept: Tensor) -> None:
        """Set the optimizer state to zero where `kept` is false."""
        param = self._parameters[name]
        if isinstance(param, ParameterAtRest):
            clear_state(param.home.store, param.home.stage, {param.home.index: kept})
        elif self._optimizer is not None:
            for value in self._optimizer.state.get(param, {}).values():
                if isinstance(value, Tensor) and value.shape == kept.shape:
                    value.masked_fill_(~kept.to(value.device), 0)


def _by_step(value: float | Value) -> Value:
    return Constant(float(value)) if isinstance(value, int | float) else value
