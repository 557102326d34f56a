"""What happens to the tensors that backward needs: kept, computed again, or moved out and back.

[Note: autograd and weights]
Autograd saves the weights that backward needs as it saves anything else. A saved view of a slab would pin the
slab until backward; so it is replaced by a handle (stage, dtype, shape, strides, offset), which is resolved
against the slab that holds the stage when backward comes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from headwater.core.buffers import aligned_empty, round_up
from headwater.store.files import BlockFile

_SMALLEST_OFFLOAD_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class WeightHandle:
    """A view of a stage's weights, without the weights."""

    stage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    @classmethod
    def of(cls, stage: int, view: torch.Tensor) -> WeightHandle:
        return cls(stage, view.dtype, tuple(view.shape), view.stride(), view.storage_offset())

    def resolve(self, image: torch.Tensor) -> torch.Tensor:
        """The view, in the memory that holds the stage now."""
        whole = image[: image.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, self.storage_offset)


@contextmanager
def without_weights(
    stage_of: Callable[[torch.Tensor], int | None],
    require: Callable[[int], torch.Tensor],
    offload: Callable[[torch.Tensor], Any],
) -> Iterator[None]:
    """Within it, what autograd saves holds no weights, and what `offload` takes is moved out.

    Args:
        stage_of: the stage in whose memory a tensor lies, or `None`.
        require: gives the memory that holds a stage, fetching it if it must.
        offload: moves an activation out, and returns what brings it back when called; or returns `None`.
    """

    def pack(tensor: torch.Tensor) -> Any:  # noqa: ANN401
        stage = stage_of(tensor)
        if stage is not None:
            return WeightHandle.of(stage, tensor)
        moved = offload(tensor)
        return tensor if moved is None else moved

    def unpack(packed: Any) -> torch.Tensor:  # noqa: ANN401
        if isinstance(packed, WeightHandle):
            return packed.resolve(require(packed.stage))
        restored: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed()
        return restored

    with saved_tensors_hooks(pack, unpack):
        yield


def recompute_forward(module: nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """From now on `module` keeps only its inputs for backward and runs its forward again there.

    Args:
        module: whose forward is wrapped.
        enter: called before each run of the forward: binds the weights.
        leave: called after it.
    """
    forward = module.forward

    def bound_forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        enter()
        try:
            return forward(*args, **kwargs)
        finally:
            leave()

    def checkpointed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not torch.is_grad_enabled():
            return bound_forward(*args, **kwargs)
        return checkpoint(
            bound_forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (_nothing(), _unchanged_buffers(module)),
            **kwargs,
        )

    module.forward = checkpointed  # type: ignore[method-assign]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """A second forward must not move running statistics a second time."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class DiskOffload:
    """Moves activations to a file and back; for a device that has no other memory than the host's.

    Args:
        folder: where the file goes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._names = itertools.count()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="headwater-offload")

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Begin to move a tensor out; `None` if it is too small to be worth it."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < _SMALLEST_OFFLOAD_BYTES or tensor.device.type != "cpu":
            return None
        return _Offloaded(self._folder / f"activation_{next(self._names)}.bin", tensor, self._threads)

    def close(self) -> None:
        """Give back threads."""
        self._threads.shutdown(wait=True)


class _Offloaded:
    """One tensor in a file; calling it gives the tensor back."""

    def __init__(self, path: Path, tensor: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._num_bytes = tensor.numel() * tensor.element_size()
        self._writing: Future[BlockFile] = threads.submit(self._write, tensor)

    def _write(self, tensor: torch.Tensor) -> BlockFile:
        file = BlockFile(self._path, round_up(self._num_bytes))
        self._path.unlink()  # the open file is all we need: nothing is left behind if the process dies
        buffer = aligned_empty(self._num_bytes)
        self._view(buffer).copy_(tensor.detach())
        file.write(0, buffer)
        return file

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self._num_bytes].view(self._dtype).view(self._shape)

    def __call__(self) -> torch.Tensor:
        buffer = aligned_empty(self._num_bytes)
        self._writing.result().read(0, buffer)
        return self._view(buffer)

    def __del__(self) -> None:
        if not self._writing.cancel():
            self._writing.result().close()
