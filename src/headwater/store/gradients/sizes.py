"""The sizes of gradient sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec


@final
class SumSizes:
    """The dtype and the number of elements of each gradient sum. Each trainable parameter has one flat sum.

    Attributes:
        dtypes: the dtypes of the sums.
        largest_gradient_bytes: the most that one stage's gradients of a micro-batch take.

    Args:
        stages: the stages.
        dtype: see `ParamSpec.sum_dtype`.
    """

    def __init__(self, stages: Sequence[StageSpec], dtype: torch.dtype | None) -> None:
        specs = {
            (stage.index, index): param
            for stage in stages
            for index, param in enumerate(stage.params)
            if param.requires_grad
        }
        self._numel = {key: spec.numel for key, spec in specs.items()}
        self.dtypes = {key: spec.sum_dtype(dtype) for key, spec in specs.items()}
        arriving = Counter[int]()
        for (stage_index, _), spec in specs.items():
            arriving[stage_index] += spec.numel * spec.gradient_dtype.itemsize
        self.largest_gradient_bytes = max(arriving.values(), default=0)

    def numel(self, key: ParamKey) -> int:
        """Return how many elements a sum has."""
        return self._numel[key]

    def num_bytes(self, key: ParamKey) -> int:
        """Return how many bytes a sum has."""
        return self._numel[key] * self.dtypes[key].itemsize
