"""Buffers in memory or on disk, in which one rank's gradients wait for the update of their stage."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import final

import torch

from headwater.core.buffers import aligned_temporary, round_up
from headwater.core.stage import StageSpec
from headwater.store.files import BlockFile, open_files
from headwater.store.gradients.port import Gradients


class GradientBuffer(abc.ABC):
    """A place in which the gradient sums of each stage wait for the stage's update."""

    @abc.abstractmethod
    def is_memory(self, stage: int) -> bool:
        """True if `look` returns the stored tensors of a stage themselves, not copies."""

    @abc.abstractmethod
    def put(self, stage: int, gradients: Gradients) -> None:
        """Store the gradients of a stage."""

    @abc.abstractmethod
    def take(self, stage: int) -> Gradients | None:
        """Remove and return the gradients of a stage, or `None` if the buffer does not hold any of them."""

    @abc.abstractmethod
    def look(self, stage: int) -> Gradients:
        """Return the gradients of a stage, which stay in the buffer. Without gradients the list is empty."""

    @abc.abstractmethod
    def drop(self, stage: int, param: int) -> None:
        """Discard the gradient of one parameter."""

    @abc.abstractmethod
    def keep(self, stage: int) -> None:
        """Save the gradients of a stage for `restore`. Callers must not change them before `forget`."""

    @abc.abstractmethod
    def restore(self, stage: int) -> None:
        """Bring back the gradients of a stage as `keep` has saved them."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Discard all gradients that `keep` has saved."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory and files."""


@final
class MemoryBuffer(GradientBuffer):
    """A gradient buffer in memory. It keeps the tensors that autograd made, and copies nothing."""

    def __init__(self) -> None:
        self._held: dict[int, Gradients] = {}
        self._kept: dict[int, Gradients] = {}

    def is_memory(self, stage: int) -> bool:
        return True

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

    def keep(self, stage: int) -> None:
        self._kept[stage] = list(self.look(stage))

    def restore(self, stage: int) -> None:
        self._held[stage] = self._kept.pop(stage)

    def forget(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self._held.clear()
        self._kept.clear()


@final
class DiskBuffer(GradientBuffer):
    """A gradient buffer on disk, with a file for each stage. One stage's gradients at a time are in memory.

    Sparse gradients stay in memory: they have a few rows each.

    Args:
        stages: the stages whose gradients are put here.
        folder: where the files are created.
        sum_dtype: see `ParamSpec.sum_dtype`.
        verify: compare what is read with checksums of what was written.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        folder: Path,
        sum_dtype: torch.dtype | None,
        *,
        verify: bool = False,
    ) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._verify = verify
        self._sum_dtype = sum_dtype
        self._paths = {s.index: folder / f"gradient_{s.index:04d}.bin" for s in stages}
        self._files = dict(zip(self._stages, self._open(list(self._stages)), strict=True))
        self._present: dict[int, list[bool]] = {}
        self._sparse: dict[int, dict[int, torch.Tensor]] = {}
        self._kept: dict[int, tuple[BlockFile, list[bool], dict[int, torch.Tensor]]] = {}
        self._spare: dict[int, BlockFile] = {}  # second files of stages, opened when a stage is first kept

    def is_memory(self, stage: int) -> bool:
        return False

    def _open(self, stages: Sequence[int]) -> list[BlockFile]:
        contents = [f"the gradients of stage {self._stages[stage].name!r}" for stage in stages]
        return open_files(
            {self._paths[stage]: self._span(self._stages[stage]) for stage in stages},
            contents=contents if self._verify else None,
        )

    def _views(self, stage: StageSpec, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter's gradient in `buffer`, which holds the bytes of the file."""
        views, offset = [], 0
        for param in stage.params:
            dtype = param.sum_dtype(self._sum_dtype)
            count = param.numel * dtype.itemsize
            views.append(param.arranged(buffer[offset : offset + count].view(dtype)))
            offset += round_up(count, 64)
        return views

    def _span(self, stage: StageSpec) -> int:
        """Return the size in bytes of the gradient file of a stage."""
        sizes = (param.numel * param.sum_dtype(self._sum_dtype).itemsize for param in stage.params)
        return round_up(sum(round_up(size, 64) for size in sizes))

    def put(self, stage: int, gradients: Gradients) -> None:
        # The sums count as present only after the write, so that a failed write leaves no half-written sums.
        self._write(stage, self._files[stage], gradients)
        self._sparse[stage] = {i: g for i, g in enumerate(gradients) if g is not None and g.is_sparse}
        self._present[stage] = [gradient is not None for gradient in gradients]

    def _write(self, stage: int, file: BlockFile, gradients: Gradients) -> None:
        """Write the dense gradients of a stage to one of its files."""
        spec = self._stages[stage]
        buffer = aligned_temporary(self._span(spec))
        for view, gradient in zip(self._views(spec, buffer), gradients, strict=True):
            if gradient is not None and not gradient.is_sparse:
                view.copy_(gradient)
        file.write(0, buffer[: self._span(spec)])

    def take(self, stage: int) -> Gradients | None:
        held = self.look(stage)
        self._present.pop(stage, None)
        self._sparse.pop(stage, None)
        return held or None

    def drop(self, stage: int, param: int) -> None:
        if stage in self._present:
            self._present[stage][param] = False
            self._sparse.get(stage, {}).pop(param, None)

    def look(self, stage: int) -> Gradients:
        present = self._present.get(stage, [])
        if not any(present):
            return []
        spec = self._stages[stage]
        buffer = aligned_temporary(self._span(spec))
        self._files[stage].read(0, buffer[: self._span(spec)])
        views = self._views(spec, buffer)
        # The update may change these clones in place; a saved sum must not change.
        sparse = {index: gradient.clone() for index, gradient in self._sparse.get(stage, {}).items()}
        return [sparse.get(i, view) if present[i] else None for i, view in enumerate(views)]

    def keep(self, stage: int) -> None:
        # The file with the sums becomes the saved one. A copy in the other file is used from now on.
        held = self.look(stage)
        if stage not in self._spare:
            self._spare[stage] = self._open([stage])[0]
        # The files change their roles only after this write: if it fails, the old file holds the gradients.
        if held:
            self._write(stage, self._spare[stage], held)
        present, sparse = list(self._present.get(stage, [])), dict(self._sparse.get(stage, {}))
        self._kept[stage] = self._files[stage], present, sparse
        self._files[stage] = self._spare.pop(stage)

    def restore(self, stage: int) -> None:
        self._spare[stage] = self._files[stage]
        self._files[stage], self._present[stage], self._sparse[stage] = self._kept.pop(stage)

    def forget(self) -> None:
        self._spare |= {stage: file for stage, (file, _, _) in self._kept.items()}
        self._kept.clear()

    def close(self) -> None:
        self.forget()
        for file in (*self._files.values(), *self._spare.values()):
            file.close()


@final
class SplitBuffer(GradientBuffer):
    """A gradient buffer that keeps the gradients of some stages in memory, and those of the others elsewhere.

    Args:
        stages: indices of the stages whose gradients are kept in memory, on the device where they are.
        others: the buffer of the other stages.
    """

    def __init__(self, stages: Collection[int], others: GradientBuffer) -> None:
        self._stages = stages
        self._memory = MemoryBuffer()
        self._others = others

    def _of(self, stage: int) -> GradientBuffer:
        return self._memory if stage in self._stages else self._others

    def is_memory(self, stage: int) -> bool:
        return self._of(stage).is_memory(stage)

    def put(self, stage: int, gradients: Gradients) -> None:
        self._of(stage).put(stage, gradients)

    def take(self, stage: int) -> Gradients | None:
        return self._of(stage).take(stage)

    def look(self, stage: int) -> Gradients:
        return self._of(stage).look(stage)

    def drop(self, stage: int, param: int) -> None:
        self._of(stage).drop(stage, param)

    def keep(self, stage: int) -> None:
        self._of(stage).keep(stage)

    def restore(self, stage: int) -> None:
        self._of(stage).restore(stage)

    def forget(self) -> None:
        self._memory.forget()
        self._others.forget()

    def close(self) -> None:
        self._memory.close()
        self._others.close()
