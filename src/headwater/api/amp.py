"""Mixed precision in a user's loop: the half dtype, loss scaling, and the optimizer step around it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch

from headwater.api import optimizers
from headwater.api.backend import current_backend
from headwater.core.errors import CheckpointError, ConfigError, NonFiniteError, StreamError
from headwater.core.trees import map_tensors
from headwater.optim.configure import configured_lr_scheduler
from headwater.optim.loss_scale import GROWTH_INTERVAL, INITIAL, LARGEST, SMALLEST, LossScale

D = TypeVar("D", float, float | None)

_HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_STATE = ("value", "good_steps", "steps", "overflows")
"""What a checkpoint keeps of a `LossScale`; the rest is what the script says."""

_half_dtype = torch.bfloat16


def set_half_dtype(dtype: Literal["bfloat16", "float16"] | torch.dtype) -> torch.dtype:
    """Choose the dtype that `autocast` computes in from now on, and give it.

    Raises:
        ConfigError: if it is neither bfloat16 nor float16.
    """
    global _half_dtype
    chosen = _HALF_DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _HALF_DTYPES.values():
        raise ConfigError(
            f"{dtype!r} is no half dtype", where="amp.set_half_dtype", remedy="write 'bfloat16' or 'float16'"
        )
    _half_dtype = chosen
    return _half_dtype


def get_half_dtype() -> torch.dtype:
    """The dtype that `autocast` computes in; bfloat16 unless `set_half_dtype` was called."""
    return _half_dtype


def autocast() -> torch.autocast:
    """`torch.autocast` with the half dtype, for the device of the current backend or else the CPU."""
    backend = current_backend()
    device = "cpu" if backend is None else backend.torch_device.type
    return torch.autocast(device, dtype=_half_dtype)


class GradScaler:
    """Scales the loss, so that small fp16 gradients do not vanish, and unscales the gradients.

    Args:
        loss_scale: the scale; `"dynamic"` for one that is halved by a step whose gradient is not finite (that
            step is skipped), and doubled after a number of good steps; no scale if not given.
        init_scale: where a dynamic scale starts.
        steps_per_increase: good steps in a row after which it is doubled.
        min_loss_scale: it does not fall below this; there a gradient that is not finite is an error.
        max_loss_scale: it does not rise above this.
        overflow_tolerance: share of the steps since it last changed that may be not finite, with no change.
        max_gradient_norm: clip the global norm of the unscaled gradients to this in every step.

    Raises:
        ConfigError: for values that make no sense.
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
                f"init_scale {first} is not between min_loss_scale {self._scale.smallest} and "
                f"max_loss_scale {self._scale.largest}",
                where="amp.GradScaler",
                remedy="widen the limits, or start between them",
            )
        self._max_gradient_norm = _positive("max_gradient_norm", max_gradient_norm, None)
        self._found_finite: dict[int, bool] = {}  # by id of an optimizer whose gradients are unscaled already
        self._applied: list[bool] = []

    def get_scale(self) -> float:
        """The factor on the loss."""
        return self._scale.value

    def scale(self, outputs: Any) -> Any:
        """The loss, or tensors nested in any way, times the scale: call `backward` on the result."""
        return map_tensors(self._scaled, outputs)

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._scale.value == 1.0:
            return tensor
        return tensor * torch.full((), self._scale.value, device=tensor.device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the gradients of an optimizer, to clip or to look at them before `step`.

        Raises:
            StreamError: if that was done since the last `update`.
        """
        if id(optimizer) in self._found_finite:
            raise StreamError(
                "the gradients of this optimizer are unscaled already",
                where="GradScaler.unscale_",
                remedy="call unscale_ once, and update() after each step",
            )
        self._found_finite[id(optimizer)] = _unscale(optimizer, self._scale.value)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_gradient_norm: float | None = None,
        max_gradient_value: float | None = None,
    ) -> bool:
        """Unscale, clip, and step the optimizer; a dynamic scale skips a step whose gradient is not finite.

        Args:
            optimizer: it steps.
            max_gradient_norm: clip the global 2-norm of its gradients to this.
            max_gradient_value: clip every element of its gradients to ± this.

        Returns:
            Whether the step was applied.

        Raises:
            NonFiniteError: if it was not, and the scale cannot fall any further.
        """
        is_unscaled = id(optimizer) in self._found_finite
        applied = False
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
        """Let the scale follow what became of the steps since the last update; call it once after them.

        Raises:
            StreamError: if there was none.
        """
        if not self._applied:
            raise StreamError(
                "the loss scale is updated, and no optimizer has stepped",
                where="GradScaler.update",
                remedy="call GradScaler.step(optimizer) first",
            )
        self._scale = self._scale.after(applied=all(self._applied))
        self._applied.clear()
        self._found_finite.clear()

    def state_dict(self) -> dict[str, float | int]:
        """Where the scale stands, for a checkpoint."""
        return {name: getattr(self._scale, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            CheckpointError: if it is something else.
        """
        if set(state) != set(_STATE):
            raise CheckpointError(
                f"the state of a GradScaler has the keys {', '.join(_STATE)}, found {', '.join(state)}",
                remedy="give what GradScaler.state_dict() returned",
            )
        self._scale = dataclasses.replace(self._scale, **state)


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """Everything between the loss and the next batch: zero the gradients, backward, unscale, clip, step.

    A scheduler that `optim.configure_lr_scheduler` made for the optimizer is stepped too; a loop that calls
    its `step()` as well does not step it twice.

    Args:
        loss: a scalar with a graph.
        optimizer: it steps.
        grad_scaler: scales the loss, and is updated.
        max_gradient_norm: clip the global 2-norm of the gradients to this, as torch's `clip_grad_norm_` does.
        max_gradient_value: clip every element to ± this, as torch's `clip_grad_value_` does.

    Raises:
        ConfigError: for two ways of clipping at once, or a limit that is not above 0.
        NonFiniteError: if a gradient is not finite and no dynamic scale can be the cause. Without a dynamic
            scale plain parameters are updated all the same, as torch does.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise ConfigError(
            "gradients are clipped by norm or by value, not both",
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


def _unscale(optimizer: torch.optim.Optimizer, scale: float) -> bool:
    """Divide its gradients by the scale; whether they are finite."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params if param.grad is not None]
    for gradient in gradients:
        gradient.mul_(1.0 / scale)
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def _positive(name: str, value: Any, default: D) -> float | D:
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(
            f"{name} is a number above 0, found {value!r}", where="amp", remedy=f"correct {name}"
        )
    return value
