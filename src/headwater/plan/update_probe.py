"""A stage in memory, whose updates show how fast this machine updates weights."""

from __future__ import annotations

import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.layout import Scalars
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.update import Part, Pending, Progress, Update
from headwater.store.updater import Updater

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The wire dtypes that the kernel of updates supports. They decide how masters are stored."""


class StageOfAllKinds:
    """A stage that AdamW updates as in a run. Equally many parameters have each way to store a master.

    Args:
        num_params: the number of parameters.
    """

    def __init__(self, num_params: int) -> None:
        each = num_params // len(_WIRES)
        params = tuple(ParamSpec(name, (each,), torch.float32, wire) for name, wire in _WIRES.items())
        rule = UpdateRule(OptimizerSpec("AdamW"))
        self._layout = stage_layout(StageSpec(0, "probe", params), rule)
        self._tier = MemoryTier([self._layout])
        self._updater = Updater(rule)
        self._gradients = [
            torch.full(param.shape, 1e-3, dtype=param.gradient_dtype, device="cpu") for param in params
        ]
        self._scalars: list[Scalars | None] = [None] * len(params)
        self.update()  # loads the kernel, and gives the state its first values

    @property
    def moved_bytes(self) -> int:
        """Bytes that an update moves, counted as in a prediction: gradients once, everything else twice."""
        stored = self._layout.stage.slab_bytes + self._layout.rest_bytes
        return 2 * stored + sum(gradient.nbytes for gradient in self._gradients)

    def update(self) -> None:
        """Update all parameters."""
        image = self._tier.resident_wire(0)
        assert image is not None, "the stage is in memory"
        groups = self._tier.groups(0, self._layout.groups)
        part, progress = Part(1, Update(1, {}), torch.tensor(0.5, device="cpu")), Progress.of(self._scalars)
        pending = Pending(1, dict.fromkeys(range(len(self._gradients)), part))
        gradients: list[torch.Tensor | None] = list(self._gradients)  # the update removes its entries
        self._updater.apply(self._layout, image, groups, gradients, self._scalars, pending, progress)
        self._scalars = progress.after
