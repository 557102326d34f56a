"""State of a run: everything except weights and optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headwater.core.arithmetic import Kernels
from headwater.core.errors import FROM_WEIGHTS, CheckpointError
from headwater.optim.loss_scale import LossScale


@dataclasses.dataclass(frozen=True)
class RunState:
    """The state of a run after some steps. It has no random state: random numbers depend on seed and step.

    Attributes:
        step: steps done.
        loss_scale: loss scale of the next step.
        micro_batch_size: micro-batch size of the plan. Another size would sum gradients in another order.
            `None` before the first plan.
        compiled: True if blocks are compiled, which changes rounding; `None` if that is unknown.
        validated_step: step of the last finished validation; -1 before the first.
        data: position after the batch of the last step; `None` before the first.
        masks: masks of the weights that are kept sparse; `None` without sparse training.
        attention_kernel: True if the package's kernel computes attention, which changes rounding; `None` if
            that is unknown.
        kernels: the kernels of matrix products, which change rounding; `None` if they are unknown.
        returned_to: step of the run's own checkpoint to which `ckpt_path` last sent it back; `None` if never.
    """

    step: int
    loss_scale: LossScale
    micro_batch_size: int | None = None
    validated_step: int = -1
    data: Mapping[str, Any] | None = None
    masks: dict[str, Tensor] | None = None
    returned_to: int | None = None
    compiled: bool | None = None
    attention_kernel: bool | None = None
    kernels: Kernels | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, where: str) -> RunState:
        """Return the state that `to_dict` returned as plain data.

        Raises:
            CheckpointError: if it is not the state of a run.
        """
        try:
            return cls(**{**state, "loss_scale": LossScale(**state["loss_scale"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint does not hold the state of a run: {error}",
                where=where,
                remedy=FROM_WEIGHTS,
            ) from error
