"""Mixed precision in a user's loop: the 16-bit dtype, loss scaling, and optimizer steps with both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch

from headwater.api import optimizers
from headwater.api.backend import current_backend
from headwater.api.gradients import are_finite, gradients_of, unscale
from headwater.core.errors import CheckpointError, ConfigError, NonFiniteError, StreamError
from headwater.core.process_value import ProcessValue
from headwater.core.trees import map_tensors
from headwater.optim.configure import configured_lr_scheduler
from headwater.optim.loss_scale import GROWTH_INTERVAL, INITIAL, LARGEST, SMALLEST, LossScale

D = TypeVar("D", float, float | None)

_HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_STATE = ("value", "good_steps", "steps", "overflows")
"""The attributes of a `LossScale` that a checkpoint holds. All others are set by the script."""

_half_dtype = ProcessValue(torch.bfloat16)
"""The dtype of `autocast`, chosen by `set_half_dtype`. Global, because `autocast` has no argument for it."""


def set_half_dtype(dtype: Literal["bfloat16", "float16"] | torch.dtype) -> torch.dtype:
    """Set the dtype in which `autocast` computes from now on, and return it.

    Raises:
        ConfigError: if `dtype` is neither bfloat16 nor float16.
    """
    chosen = _HALF_DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _HALF_DTYPES.values():
        raise ConfigError(
            f"expected bfloat16 or float16, got {dtype!r}",
            where="amp.set_half_dtype",
            remedy="write 'bfloat16' or 'float16'",
        )
    _half_dtype.value = chosen
    return chosen


def get_half_dtype() -> torch.dtype:
    """Return the dtype in which `autocast` computes; bfloat16 unless `set_half_dtype` was called."""
    return _half_dtype.value


def autocast() -> torch.autocast:
    """Return `torch.autocast` with the half dtype, for the current backend's device (default: the CPU)."""
    backend = current_backend()
    device = "cpu" if backend is None else backend.torch_device.type
    return torch.autocast(device, dtype=_half_dtype.value)


class GradScaler:
    """Multiplies the loss by a scale, so that small fp16 gradients do not vanish, and unscales gradients.

    Args:
        loss_scale: a constant scale, or `"dynamic"`. With a dynamic scale, a step with a non-finite gradient
            is skipped, and the scale is halved; after `steps_per_increase` finite steps the scale is doubled.
            The default is 1.
        init_scale: the initial value of a dynamic scale.
        steps_per_increase: number of consecutive finite steps after which a dynamic scale is doubled.
        min_loss_scale: lower bound of a dynamic scale. A non-finite gradient at this scale is an error.
        max_loss_scale: upper bound of a dynamic scale.
        overflow_tolerance: a dynamic scale is halved only if more than this fraction of the steps since its
            last change had a non-finite gradient.
        max_gradient_norm: clip the global 2-norm of the unscaled gradients to this in every step.

    Raises:
        ConfigError: if a number is not above 0 and finite, or `init_scale` is not between the two bounds.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"] | None = None,
        init_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.0,
        max_gradient_norm: float | None = None,
    ) -> None:
        is_dynamic = loss_scale == "dynamic"
        name, value, default = (
            ("init_scale", init_scale, INITIAL) if is_dynamic else ("loss_scale", loss_scale, 1.0)
        )
        first = _positive(name, value, default)
        self._scale = LossScale(
            first,
            dynamic=is_dynamic,
            growth_interval=int(_positive("steps_per_increase", steps_per_increase, GROWTH_INTERVAL)),
            smallest=_positive("min_loss_scale", min_loss_scale, SMALLEST),
            largest=_positive("max_loss_scale", max_loss_scale, LARGEST),
            overflow_tolerance=overflow_tolerance,
        )
        if is_dynamic and not self._scale.smallest <= first <= self._scale.largest:
            raise ConfigError(
                f"expected init_scale between min_loss_scale {self._scale.smallest} and "
                f"max_loss_scale {self._scale.largest}, got {first}",
                where="amp.GradScaler",
                remedy="set init_scale between them, or change min_loss_scale or max_loss_scale",
            )
        self._max_gradient_norm = _positive("max_gradient_norm", max_gradient_norm, None)
        self._found_finite: dict[int, bool] = {}  # by id of an optimizer that was unscaled already
        self._applied: list[bool] = []

    def get_scale(self) -> float:
        """Return the scale: the factor by which the loss is multiplied."""
        return self._scale.value

    def scale(self, outputs: Any) -> Any:
        """Return the loss times the scale; call `backward` on the result. Nested tensors are scaled too."""
        return map_tensors(self._scaled, outputs)

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        # At scale 1 the loss itself is returned, so that the autograd graph gets no additional node.
        if self._scale.value == 1.0:
            return tensor
        return tensor * torch.full((), self._scale.value, dtype=torch.float32, device=tensor.device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, to clip or read them before `step`.

        Raises:
            StreamError: if this optimizer's gradients were already divided since the last `update`.
        """
        if id(optimizer) in self._found_finite:
            raise StreamError(
                "the gradients of this optimizer are unscaled already",
                where="GradScaler.unscale_",
                remedy="call unscale_ once in each step, and update() after the step",
            )
        gradients = gradients_of(optimizer)
        unscale(gradients, self._scale.value)
        self._found_finite[id(optimizer)] = are_finite(gradients)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_gradient_norm: float | None = None,
        max_gradient_value: float | None = None,
    ) -> bool:
        """Unscale and clip the gradients, then step the optimizer.

        With a dynamic scale, a step whose gradients are not finite is skipped.

        Args:
            optimizer: the optimizer to step.
            max_gradient_norm: clip the global 2-norm of its gradients to this.
            max_gradient_value: clip every element of its gradients to ± this.

        Returns:
            True if the step was applied, false if it was skipped.

        Raises:
            NonFiniteError: if a gradient is not finite and the scale is at its lower bound.
        """
        is_unscaled = id(optimizer) in self._found_finite
        applied = False
        # `unscale_` may have found a non-finite gradient already. Such a step need not begin.
        if self._found_finite.get(id(optimizer), True) or not self._scale.dynamic:
            applied = optimizers.step(
                optimizer,
                max_norm=_positive("max_gradient_norm", max_gradient_norm, self._max_gradient_norm),
                max_value=_positive("max_gradient_value", max_gradient_value, None),
                loss_scale=1.0 if is_unscaled else self._scale.value,
                skip_non_finite=self._scale.dynamic,
            )
        if not applied and not self._scale.may_skip:
            raise NonFiniteError(
                f"a gradient is not finite at the smallest loss scale, {self._scale.value}",
                where="GradScaler.step",
                remedy="lower the learning rate, look at the data of this step, or lower min_loss_scale",
            )
        self._applied.append(applied)
        return applied

    def update(self) -> None:
        """Raise or lower a dynamic scale, given the steps since the last `update`.

        Call this once in each iteration, after all optimizers have stepped.

        Raises:
            StreamError: if no optimizer has stepped since the last update.
        """
        if not self._applied:
            raise StreamError(
                "GradScaler.update() was called before a step of an optimizer",
                where="GradScaler.update",
                remedy="call GradScaler.step(optimizer) first",
            )
        # All optimizers share the scale, so one skipped step counts as an overflow of the scale.
        self._scale = self._scale.after(applied=all(self._applied))
        self._applied.clear()
        self._found_finite.clear()

    def state_dict(self) -> dict[str, float | int]:
        """Return the state of the scale, for a checkpoint."""
        return {name: getattr(self._scale, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            CheckpointError: if `state` has other keys.
        """
        if set(state) != set(_STATE):
            raise CheckpointError(
                f"expected a state with the keys {', '.join(_STATE)}, got {', '.join(state)}",
                where="GradScaler.load_state_dict",
                remedy="pass the result of GradScaler.state_dict()",
            )
        self._scale = dataclasses.replace(self._scale, **state)


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """Zero the gradients, call backward, unscale and clip the gradients, and step the optimizer.

    A scheduler that `optim.configure_lr_scheduler` made for the optimizer is stepped too. If the loop also
    calls the scheduler's `step()`, the scheduler still steps only once.

    Args:
        loss: a scalar with a graph.
        optimizer: the optimizer to step.
        grad_scaler: scales the loss; its `update` is called too. If not given, the loss is not scaled.
        max_gradient_norm: clip the global 2-norm of the gradients to this, as torch's `clip_grad_norm_` does.
        max_gradient_value: clip every element to ± this, as torch's `clip_grad_value_` does.

    Raises:
        ConfigError: if both limits are given, or a limit is not above 0.
        NonFiniteError: if a gradient is not finite, unless a dynamic scale can be lowered. Without a dynamic
            scale, parameters that are not streamed are still updated, as in torch.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise ConfigError(
            "expected one of max_gradient_norm and max_gradient_value, got both",
            where="amp.optimizer_step",
            remedy="leave out max_gradient_norm or max_gradient_value",
        )
    scaler = GradScaler() if grad_scaler is None else grad_scaler
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer, max_gradient_norm=max_gradient_norm, max_gradient_value=max_gradient_value)
    scaler.update()
    scheduler = configured_lr_scheduler(optimizer)
    if scheduler is not None:
        scheduler.step_with_optimizer()


def _positive(name: str, value: Any, default: D) -> float | D:
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(
            f"expected {name} to be a finite number above 0, got {value!r}",
            where="amp",
            remedy=f"pass a positive number as {name}, such as 1.0",
        )
    return value
