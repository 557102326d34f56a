"""Gradients on their way to the update: summed over micro-batches, measured, held in memory or on disk."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.stage import StageSpec
from headwater.store.files import open_files
from headwater.store.layout import PIECE_ELEMENTS

Gradients = list[torch.Tensor | None]
"""One per parameter of a stage; `None` where the parameter got none."""


class GradientHold(abc.ABC):
    """Where summed gradients wait for the update."""

    @abc.abstractmethod
    def put(self, stage: int, gradients: Gradients) -> None:
        """Hold what `take` will return."""

    @abc.abstractmethod
    def take(self, stage: int) -> Gradients | None:
        """Give back what is held, and hold it no longer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and files."""


class MemoryHold(GradientHold):
    """Holds the very tensors that autograd made: nothing is copied."""

    def __init__(self) -> None:
        self._held: dict[int, Gradients] = {}

    def put(self, stage: int, gradients: Gradients) -> None:
        self._held[stage] = gradients

    def take(self, stage: int) -> Gradients | None:
        return self._held.pop(stage, None)

    def close(self) -> None:
        self._held.clear()


class DiskHold(GradientHold):
    """Writes each stage's gradients to a file beside its weights; one stage at a time is in memory.

    Args:
        stages: the stages.
        folder: where the files go.
        dtype_of: dtype in which the gradient of a parameter is held.
        direct: bypass the page cache.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        folder: Path,
        dtype_of: Callable[[torch.dtype], torch.dtype],
        *,
        direct: bool = True,
    ) -> None:
        self._stages = stages
        self._dtype_of = dtype_of
        self._present: dict[int, list[bool]] = {}
        self._files = open_files(
            {folder / f"gradient_{s.index:04d}.bin": self._span(s) for s in stages},
            direct=direct,
        )

    def _views(self, stage: StageSpec, buffer: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for param in stage.params:
            dtype = self._dtype_of(param.wire_dtype)
            count = param.numel * dtype.itemsize
            views.append(buffer[offset : offset + count].view(dtype).view(param.shape))
            offset += round_up(count, 64)
        return views

    def _span(self, stage: StageSpec) -> int:
        sizes = (param.numel * self._dtype_of(param.wire_dtype).itemsize for param in stage.params)
        return round_up(sum(round_up(size, 64) for size in sizes))

    def put(self, stage: int, gradients: Gradients) -> None:
        spec = self._stages[stage]
        buffer = aligned_empty(self._span(spec))
        for view, gradient in zip(self._views(spec, buffer), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        self._files[stage].write(0, buffer[: self._span(spec)])
        self._present[stage] = [gradient is not None for gradient in gradients]

    def take(self, stage: int) -> Gradients | None:
        present = self._present.pop(stage, None)
        if present is None:
            return None
        spec = self._stages[stage]
        buffer = aligned_empty(self._span(spec))
        self._files[stage].read(0, buffer[: self._span(spec)])
        views = self._views(spec, buffer)
        return [view if there else None for view, there in zip(views, present, strict=True)]

    def close(self) -> None:
        for file in self._files:
            file.close()


@dataclasses.dataclass
class _Arriving:
    gradients: Gradients
    norms: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)


class GradientSum:
    """Sums the gradients of a step's micro-batches and takes their norms as they arrive.

    Args:
        stages: the stages.
        hold: where sums wait.
        mixed_sum_dtype: dtype of the sums of mixed-precision gradients; `None` keeps the gradient's own,
            which is exact where there is one micro-batch.
    """

    def __init__(
        self, stages: Sequence[StageSpec], hold: GradientHold, mixed_sum_dtype: torch.dtype | None
    ) -> None:
        self._stages = stages
        self._hold = hold
        self._mixed_sum_dtype = mixed_sum_dtype
        self._arriving: dict[int, _Arriving] = {}
        self._norms: dict[tuple[int, int], torch.Tensor] = {}
        self.first_bad: int | None = None
        self.touched: set[int] = set()

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        """Take the gradient of one parameter for one micro-batch.

        Args:
            stage: its stage.
            param: its index in the stage.
            gradient: it belongs to the store from now on.
            last: whether it is the step's last micro-batch.

        Returns:
            Whether the stage now has the gradients of all its trainable parameters.
        """
        arriving = self._arriving.get(stage)
        if arriving is None:
            held = self._hold.take(stage)
            arriving = self._arriving[stage] = _Arriving(held or [None] * len(self._stages[stage].params))
        total = arriving.gradients[param]
        if total is None:
            arriving.gradients[param] = total = self._own(gradient)
        else:
            total.add_(gradient)
        if last:
            arriving.norms[param] = self._measured(stage, total)
        self.touched.add(stage)
        return last and len(arriving.norms) == sum(p.requires_grad for p in self._stages[stage].params)

    def _own(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._mixed_sum_dtype is None or gradient.dtype == self._mixed_sum_dtype:
            return gradient.detach()
        return gradient.to(self._mixed_sum_dtype)

    def _measured(self, stage: int, total: torch.Tensor) -> torch.Tensor:
        norm = gradient_norm(total)
        if self.first_bad is None and not bool(norm.isfinite()):
            self.first_bad = stage
        return norm

    def settle(self, stage: int, *, last: bool) -> None:
        """Hold what has arrived for a stage."""
        arriving = self._arriving.pop(stage, None)
        if arriving is None:
            return
        if last:  # parameters that got nothing from the last micro-batch, but from one before
            for param, total in enumerate(arriving.gradients):
                if total is not None and param not in arriving.norms:
                    arriving.norms[param] = self._measured(stage, total)
        self._norms |= {(stage, param): norm for param, norm in arriving.norms.items()}
        self._hold.put(stage, arriving.gradients)

    def settle_all(self, *, last: bool) -> None:
        """Hold everything that has arrived; the end of a micro-batch."""
        if last:  # stages that got nothing from the last micro-batch, but from one before
            for stage in self.touched - self._arriving.keys() - {stage for stage, _ in self._norms}:
                self._arriving[stage] = _Arriving(self._hold.take(stage) or [])
        for stage in sorted(self._arriving):
            self.settle(stage, last=last)

    def norm(self, order: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The global norm, fp32, as `torch.nn.utils.get_total_norm` takes it over parameters in `order`."""
        norms = [self._norms[key] for key in order if key in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def take(self, stage: int) -> Gradients | None:
        """Give the sums of a stage away."""
        return self._hold.take(stage)

    def begin_step(self) -> None:
        """Forget norms, and what a step that did not commit has left behind."""
        for stage in [*self._arriving, *self.touched]:
            self._arriving.pop(stage, None)
        self._norms.clear()
        self.first_bad = None
        self.touched.clear()

    def close(self) -> None:
        """Give back memory and files."""
        self._hold.close()

    def discard(self) -> None:
        """Drop all gradients of this step."""
        for stage in self.touched:
            self._hold.take(stage)
        self.begin_step()


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """2-norm in fp32 (or wider). Of a narrow gradient it is taken piece by piece, without a wide copy."""
    if gradient.dtype in (torch.float32, torch.float64):
        whole: torch.Tensor = torch.linalg.vector_norm(gradient)
        return whole
    pieces = gradient.reshape(-1).split(PIECE_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    combined: torch.Tensor = torch.linalg.vector_norm(norms)
    return combined
