"""The ranks as a process group of `torch.distributed`, for metrics and scripts that use one.

Its collectives use the connections of `headwater.fabric.mesh`, so they too need the secret of the run. Each
is a plain exchange between all ranks, fast enough for metrics. Weights and gradients are not sent this way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

from headwater.core.errors import RankError
from headwater.fabric.mesh import Mesh
from headwater.fabric.switchboard import Switchboard
from headwater.fabric.values import broadcast_value, exchange_values, gather_values

BACKEND = "headwater"
_Group: Any = torch.distributed.ProcessGroup
_Work: Any = torch.distributed.Work
_Store: Any = torch._C._distributed_c10d.Store

_REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def start_group(switchboard: Switchboard, size: int, timeout_s: float) -> None:
    """Make the ranks of this run the default process group of `torch.distributed`.

    Args:
        switchboard: the connections of this rank.
        size: number of ranks.
        timeout_s: seconds to wait for another rank in a collective.
    """

    def make(options: Any, _: object) -> RankGroup:
        # The list of ranks is empty for the default group, which has all ranks.
        ranks = options.global_ranks_in_group or range(size)
        mesh = Mesh(switchboard, ranks, options.timeout.total_seconds(), f"torch {options.group_id}")
        return RankGroup(mesh, options.group_rank, options.group_size)

    torch.distributed.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu", "cuda"])
    torch.distributed.init_process_group(
        BACKEND,
        store=_NoStore(),
        rank=switchboard.rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


@final
class RankGroup(_Group):  # type: ignore[misc]  # torch's stubs differ from the class
    """A process group of `torch.distributed` that communicates through the ranks' own connections.

    Args:
        mesh: the connections of the members.
        rank: number of this rank within the group.
        size: number of members.
    """

    def __init__(self, mesh: Mesh, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._mesh = mesh

    def getBackendName(self) -> str:
        return BACKEND

    def barrier(self, opts: object = None) -> _Done:
        self._mesh.gather(b"")
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> _Done:
        for into, own in zip(outputs, inputs, strict=True):
            _fill(into, gather_values(self._mesh, own, Tensor))
        return _Done()

    def all_gather_single(self, output: Tensor, own: Tensor, opts: object = None) -> _Done:
        _fill(list(output.view(self.size(), *own.shape)), gather_values(self._mesh, own, Tensor))
        return _Done()

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> _Done:
        for into, own in zip(zip(*outputs, strict=True), inputs, strict=True):
            _fill(into, gather_values(self._mesh, own, Tensor))
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Done:
        for tensor in tensors:
            tensor.copy_(_reduce(gather_values(self._mesh, tensor, Tensor), opts.reduceOp))
        return _Done()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> _Done:
        for tensor in tensors:
            reduced = _reduce(gather_values(self._mesh, tensor, Tensor), opts.reduceOp)
            if self.rank() == opts.rootRank:
                tensor.copy_(reduced)
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Done:
        for tensor in tensors:
            sent = broadcast_value(self._mesh, tensor, Tensor, opts.rootRank)
            if self.rank() != opts.rootRank:
                _fill([tensor], [sent])
        return _Done()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Done:
        for index, own in enumerate(inputs):
            sent = [own if to == opts.rootRank else None for to in range(self.size())]
            every: list[Any] = exchange_values(self._mesh, sent, Tensor | None)
            if self.rank() == opts.rootRank:
                _fill(outputs[index], every)
        return _Done()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Done:
        leads = self.rank() == opts.rootRank
        for index, output in enumerate(outputs):
            sent = inputs[index] if leads else [None] * self.size()
            _fill([output], [exchange_values(self._mesh, sent, Tensor | None)[opts.rootRank]])
        return _Done()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> _Done:
        for output, own in zip(outputs, inputs, strict=True):
            output.copy_(_reduce(exchange_values(self._mesh, own, Tensor), opts.reduceOp))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any) -> _Done:
        pieces = list(own.view(self.size(), *output.shape))
        return self.reduce_scatter([output], [pieces], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> _Done:
        _fill(outputs, exchange_values(self._mesh, inputs, Tensor))
        return _Done()

    def all_to_all_single(
        self, output: Tensor, own: Tensor, out_splits: list[int], in_splits: list[int], opts: object = None
    ) -> _Done:
        pieces = own.split(in_splits or len(own) // self.size())
        return self.alltoall(list(output.split(out_splits or len(output) // self.size())), list(pieces), opts)

    # names of these methods before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Done:
        data = [tensor.detach().cpu().contiguous() for tensor in tensors]
        return _Done(self._mesh.start({to: data}, {}))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Done:
        data = [torch.empty_like(tensor, device="cpu").contiguous() for tensor in tensors]
        finish = self._mesh.start({}, {source: data})

        def fill() -> None:
            finish()
            _fill(tensors, data)

        return _Done(fill)

    def shutdown(self) -> None:
        self._mesh.close()

    abort = shutdown


@final
class _Done(_Work):  # type: ignore[misc]  # torch's own class
    """A collective that has been started; `wait` blocks until it has ended."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> NoReturn:
        """Raise the error for `DistributedDataParallel`, which waits for futures in its backward.

        Raises:
            RankError: always.
        """
        raise RankError(
            "DistributedDataParallel is not supported on the ranks of headwater.backend(num_csx=...)",
            where="torch.distributed",
            remedy="call the model without a wrapper: Headwater averages the gradients of the ranks. With "
            "accelerate, call accelerator.prepare_model(model, evaluation_mode=True)",
        )


@final
class _NoStore(_Store):  # type: ignore[misc]  # torch's own class
    """An empty `torch.distributed` store: another backend fails at once instead of waiting for ranks."""


def _reduce(every: Sequence[Tensor], operation: Any) -> Tensor:
    """Reduce the tensors of all ranks in rank order, so that all ranks get the same bits."""
    pair = next((function for kind, function in _REDUCE.items() if operation == kind), None)
    if pair is None:
        names = ", ".join(kind.name for kind in _REDUCE)
        raise RankError(
            f"the reduce operation {operation} is not supported",
            where="torch.distributed",
            remedy=f"use one of {names}",
        )
    reduced = functools.reduce(pair, every)
    return reduced / len(every) if operation == ReduceOp.AVG else reduced


def _fill(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for target, tensor in zip(into, tensors, strict=True):
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise RankError(
                f"expected a tensor of shape {list(target.shape)} and {target.dtype} from another rank, "
                f"got {list(tensor.shape)} and {tensor.dtype}",
                remedy="give every rank tensors of the same shapes and dtypes",
            )
        target.copy_(tensor)
