"""Gradients on their way to the update: summed over micro-batches, measured, held in memory or on disk."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.stage import StageSpec
from headwater.store.files import open_files
from headwater.store.layout import PIECE_ELEMENTS

Gradients = list[torch.Tensor | None]
"""One per parameter of a stage; `None` where the parameter got none."""


_NARROW = (torch.bfloat16, torch.float16)


class GradientHold(abc.ABC):
    """Where summed gradients wait for the update.

    Attributes:
        is_memory: whether what `look` gives is what is held, and not a copy.
    """

    is_memory: bool

    @abc.abstractmethod
    def put(self, stage: int, gradients: Gradients) -> None:
        """Hold what `take` will return."""

    @abc.abstractmethod
    def take(self, stage: int) -> Gradients | None:
        """Give back what is held, and hold it no longer."""

    @abc.abstractmethod
    def look(self, stage: int) -> Gradients:
        """What is held; it stays held."""

    @abc.abstractmethod
    def drop(self, stage: int, param: int) -> None:
        """Hold the gradient of one parameter no longer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and files."""


class MemoryHold(GradientHold):
    """Holds the very tensors that autograd made: nothing is copied."""

    is_memory = True

    def __init__(self) -> None:
        self._held: dict[int, Gradients] = {}

    def put(self, stage: int, gradients: Gradients) -> None:
        self._held[stage] = gradients

    def take(self, stage: int) -> Gradients | None:
        return self._held.pop(stage, None)

    def look(self, stage: int) -> Gradients:
        return self._held.get(stage, [])

    def drop(self, stage: int, param: int) -> None:
        held = self._held.get(stage)
        if held is not None:
            held[param] = None
            if all(gradient is None for gradient in held):
                del self._held[stage]

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

    is_memory = False

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
        held = self.look(stage)
        self._present.pop(stage, None)
        return held or None

    def drop(self, stage: int, param: int) -> None:
        if stage in self._present:
            self._present[stage][param] = False

    def look(self, stage: int) -> Gradients:
        present = self._present.get(stage, [])
        if not any(present):
            return []
        spec = self._stages[stage]
        buffer = aligned_empty(self._span(spec))
        self._files[stage].read(0, buffer[: self._span(spec)])
        views = self._views(spec, buffer)
        return [view if there else None for view, there in zip(views, present, strict=True)]

    def close(self) -> None:
        for file in self._files:
            file.close()


ParamKey = tuple[int, int]
"""A parameter: its stage, and its index in the stage."""


@dataclasses.dataclass
class _Arriving:
    gradients: Gradients
    measured: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Exposed:
    """A gradient that somebody outside has been given, and how often it had been changed by then."""

    gradient: torch.Tensor
    version: int


class GradientSum:
    """Sums the gradients of a step's micro-batches and takes their norms as they arrive.

    A sum is *present* until a commit takes it or it is dropped; what a commit has taken stays in the hold
    until the update of its stage.

    Attributes:
        first_bad: the first stage whose gradient was not finite.

    Args:
        stages: the stages.
        hold: where sums wait.
        mixed_sum_dtype: dtype of the sums of mixed-precision gradients; `None` keeps the gradient's own until
            there is a second one to add, which is exact where there is one micro-batch.
    """

    def __init__(
        self, stages: Sequence[StageSpec], hold: GradientHold, mixed_sum_dtype: torch.dtype | None
    ) -> None:
        self._stages = stages
        self._hold = hold
        self._mixed_sum_dtype = mixed_sum_dtype
        self._arriving: dict[int, _Arriving] = {}
        self._norms: dict[ParamKey, torch.Tensor] = {}
        self._exposed: dict[ParamKey, _Exposed] = {}
        self.present: set[ParamKey] = set()
        self.first_bad: int | None = None

    @property
    def touched(self) -> set[int]:
        """The stages of which sums are present."""
        return {stage for stage, _ in self.present}

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        """Take the gradient of one parameter for one micro-batch.

        Args:
            stage: its stage.
            param: its index in the stage.
            gradient: it belongs to the store from now on.
            last: whether it is the step's last micro-batch, as far as is known.

        Returns:
            Whether the stage now has the gradients of all its trainable parameters.
        """
        arriving = self._arriving.get(stage)
        if arriving is None:
            self._put_back_exposed(stage)
            held = self._hold.take(stage)
            arriving = self._arriving[stage] = _Arriving(held or [None] * len(self._stages[stage].params))
        total = self._sum(arriving.gradients[param], gradient, self._stages[stage].params[param].dtype)
        arriving.gradients[param] = total
        self._norms.pop((stage, param), None)
        self.present.add((stage, param))
        if last:
            self._measure((stage, param), total)
            arriving.measured.add(param)
        return last and len(arriving.measured) == sum(p.requires_grad for p in self._stages[stage].params)

    def _sum(
        self, total: torch.Tensor | None, gradient: torch.Tensor, master_dtype: torch.dtype
    ) -> torch.Tensor:
        if total is None:
            wide = self._mixed_sum_dtype or gradient.dtype
            return gradient.detach() if gradient.dtype == wide else gradient.to(wide)
        if total.dtype in _NARROW:
            total = total.to(master_dtype)
        return total.add_(gradient)

    def _measure(self, key: ParamKey, total: torch.Tensor) -> None:
        norm = self._norms[key] = gradient_norm(total)
        if self.first_bad is None and not bool(norm.isfinite()):
            self.first_bad = key[0]

    def settle(self, stage: int) -> None:
        """Hold what has arrived for a stage."""
        arriving = self._arriving.pop(stage, None)
        if arriving is not None:
            self._hold.put(stage, arriving.gradients)

    def settle_all(self) -> None:
        """Hold everything that has arrived."""
        for stage in sorted(self._arriving):
            self.settle(stage)

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        """The global norm, fp32, as `torch.nn.utils.get_total_norm` takes it in this order."""
        self.settle_all()
        missing = {key for key in keys if key not in self._norms}
        for stage in sorted({stage for stage, _ in missing}):
            self._put_back_exposed(stage)
            for param, total in enumerate(self._hold.look(stage)):
                if total is not None and (stage, param) in missing:
                    self._measure((stage, param), total)
        norms = [self._norms[key] for key in keys]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def commit(self, keys: Iterable[ParamKey]) -> None:
        """These sums belong to an update from now on."""
        for key in keys:
            self._forget(key)
        self.first_bad = None

    def _forget(self, key: ParamKey) -> None:
        self.present.discard(key)
        self._norms.pop(key, None)
        self._exposed.pop(key, None)

    def take(self, stage: int) -> Gradients | None:
        """Give what is held of a stage away, what a commit has taken and what not."""
        self.settle(stage)
        self._put_back_exposed(stage)
        return self._hold.take(stage)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        """Hold on to what an update did not want."""
        if any(gradient is not None for gradient in gradients):
            self._hold.put(stage, gradients)

    def drop(self, stage: int, param: int) -> None:
        """Forget the sum of one parameter."""
        self.settle(stage)
        self._forget((stage, param))
        self._hold.drop(stage, param)

    def discard(self) -> None:
        """Drop every sum that no commit has taken."""
        for stage, param in list(self.present):
            self.drop(stage, param)
        self.first_bad = None

    def discard_stage(self, stage: int) -> None:
        """Drop everything of a stage, what a commit has taken included."""
        self.take(stage)
        for key in [key for key in self.present if key[0] == stage]:
            self._forget(key)

    # gradients that the user looks at

    def expose(self, stage: int, param: int) -> torch.Tensor | None:
        """The sum of one parameter, if one is present. It may be changed in place until the commit."""
        key = (stage, param)
        if key not in self.present:
            return None
        if key not in self._exposed:
            self.settle(stage)
            gradient = self._hold.look(stage)[param]
            assert gradient is not None, "a present sum is held"
            self._exposed[key] = _Exposed(gradient, gradient._version)
            self._norms.pop(key, None)
        return self._exposed[key].gradient

    def replace(self, stage: int, param: int, gradient: torch.Tensor) -> None:
        """Let this be the sum of one parameter."""
        if stage not in self._arriving:
            held = self._hold.take(stage)
            self._arriving[stage] = _Arriving(held or [None] * len(self._stages[stage].params))
        self._arriving[stage].gradients[param] = gradient.detach()
        self._forget((stage, param))
        self.present.add((stage, param))

    def _put_back_exposed(self, stage: int) -> None:
        """What was changed in a copy of a held gradient goes back to the hold."""
        if self._hold.is_memory:
            return
        keys = [key for key in self._exposed if key[0] == stage]
        changed = {k[1]: e.gradient for k in keys if (e := self._exposed[k]).gradient._version != e.version}
        for key in keys:
            del self._exposed[key]
        if changed:
            held = self._hold.take(stage) or []
            self._hold.put(stage, [changed.get(param, total) for param, total in enumerate(held)])

    def close(self) -> None:
        """Give back memory and files."""
        self._exposed.clear()
        self._hold.close()


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """2-norm in fp32 (or wider). Of a narrow gradient it is taken piece by piece, without a wide copy."""
    if gradient.dtype in (torch.float32, torch.float64):
        whole: torch.Tensor = torch.linalg.vector_norm(gradient)
        return whole
    pieces = gradient.reshape(-1).split(PIECE_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    combined: torch.Tensor = torch.linalg.vector_norm(norms)
    return combined
