"""Collectives of all ranks: gathers of values, and values that rank 0 makes for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from headwater.core.errors import HeadwaterError, RankError
from headwater.fabric.fabric import DEFAULT_TIMEOUT_S, Value
from headwater.fabric.mesh import Mesh
from headwater.fabric.roster import Roster
from headwater.fabric.switchboard import Switchboard
from headwater.fabric.values import broadcast_value, gather_values


@final
class Messages:
    """Messages between all ranks. Every rank makes the same calls in the same order.

    A rank that cannot be reached raises `RankError`.

    Args:
        switchboard: the connections of this rank.
        roster: the ranks.
        timeout_s: seconds to wait for another rank before an error is raised.
        stopped: returns which ranks of this host are stopped, for the end of a message.
    """

    def __init__(
        self, switchboard: Switchboard, roster: Roster, timeout_s: float, stopped: Callable[[], str]
    ) -> None:
        self._roster = roster
        self._stopped = stopped
        every, placement = range(len(roster.processes)), roster.placement
        self._every = new_mesh(switchboard, every, timeout_s)
        self._computing = self._every
        if placement.num_memx:
            self._computing = new_mesh(switchboard, range(placement.num_csx), timeout_s)
        # `agree` has a longer timeout, because the other ranks wait in it while rank 0 works for all.
        self._patient = new_mesh(switchboard, every, max(DEFAULT_TIMEOUT_S, timeout_s))

    def meet(self) -> None:
        """Block until every rank has called this, with the long timeout of `agree`."""
        with self._errors():
            self._patient.gather(b"")

    def gather(self, value: Value, kind: Any) -> list[Value]:
        """Return the value of each rank; see `Fabric.gather_objects`."""
        with self._errors():
            return gather_values(self._every, value, kind)

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of each compute rank; see `Fabric.gather_tensors`."""
        with self._errors():
            values = gather_values(self._computing, value, torch.Tensor)
        for rank, each in enumerate(values):
            # Every rank compares all tensors, so all ranks raise the error.
            if each.shape != value.shape or each.dtype != value.dtype:
                raise RankError(
                    f"expected a tensor of shape {list(value.shape)} and {value.dtype} from rank {rank}, "
                    f"got {list(each.shape)} and {each.dtype}",
                    remedy="compute tensors of the same shape and dtype on every rank",
                )
        return [each.to(value.device) for each in values]

    def agree(self, make: Callable[[], Value], kind: Any) -> Value:
        """Return on every rank what `make` returns on rank 0, or raise what it raises; see `Fabric.agree`."""
        made: tuple[list[Value], HeadwaterError | None] = [], None
        if self._roster.rank == 0:
            try:
                made = [make()], None
            except HeadwaterError as error:
                # The error is sent to the other ranks. Otherwise they would wait for a value.
                made = [], error
        with self._errors():
            values, failure = broadcast_value(
                self._patient, made, tuple[list[kind], HeadwaterError | None], 0
            )
        if failure is not None:
            raise failure
        return values[0]

    def close(self) -> None:
        """Close the connections."""
        for mesh in (self._every, self._computing, self._patient):
            mesh.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RankError(
                f"rank {self._roster.rank} cannot reach {self._roster.others()}: {error}{self._stopped()}",
                remedy="see the errors of the other ranks, and why they ended",
            ) from error


def new_mesh(switchboard: Switchboard, ranks: Sequence[int], timeout_s: float) -> Mesh:
    """Connect some ranks with each other. All ranks must call this, because each rank counts the meshes.

    Args:
        switchboard: the connections of this rank.
        ranks: the members.
        timeout_s: seconds to wait for another member.
    """
    return Mesh(switchboard, ranks, timeout_s, switchboard.next_purpose())
