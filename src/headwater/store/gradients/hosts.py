"""The gradients of ranks on several hosts: summed on each host, then sent to the host that updates."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey
from headwater.fabric.fabric import Fabric
from headwater.store.gradients.port import Gradients, GradientSink
from headwater.store.gradients.ranks import RankGradients
from headwater.store.gradients.stage_exchange import StageExchange


class Phase(enum.Enum):
    """The phases of a step on several hosts. Each phase says what the gradient sums of a host contain."""

    ADDING = "adding"  # gradients of this host; nothing is sent
    SENDING = "sending"  # the last micro-batch: each stage is sent as soon as its sums are complete
    SUMMED = "summed"  # gradients of all hosts, for the elements that this host updates


@final
class HostGradients(GradientSink):
    """The gradients of ranks on several hosts. Each host sums those of its ranks, then hosts exchange sums.

    The exchange begins with the last micro-batch and runs beside its backward. Second gradients of that
    micro-batch may come after the sums were sent. They are rare, and are sent in another, slower way.

    Args:
        ranks: the gradients of this host's ranks.
        fabric: the ranks of all hosts.
        exchange: sends sums to the hosts that update with them.
    """

    is_shared = True

    def __init__(self, ranks: RankGradients, fabric: Fabric, exchange: StageExchange) -> None:
        self.status = ranks.status
        self._ranks = ranks
        self._fabric = fabric
        self._exchange = exchange
        self._phase = Phase.ADDING
        self._second: dict[ParamKey, torch.Tensor] = {}  # second gradients of the last micro-batch
        self._multiplied: set[ParamKey] = set()  # sums that were multiplied since they were measured

    def add(
        self, key: ParamKey, gradient: torch.Tensor, *, last: bool, norm: torch.Tensor | None = None
    ) -> bool:
        if last and self._phase is not Phase.SENDING:
            self._phase = Phase.SENDING
            self._exchange.start(self._ranks.step, self._ranks.sums.turns.micro_batch)
        return self._ranks.add(key, gradient, last=last)

    def drain(self) -> None:
        self._ranks.drain()

    def end_micro_batch(self) -> None:
        self._second.update(self._ranks.sums.end_micro_batch(add_second=self._phase is not Phase.SENDING))

    def complete(self) -> None:
        self._ranks.wait_for_sums()
        # A second call, after sums were multiplied, only measures these again.
        if self._phase is not Phase.SUMMED:
            self._sum_all()
        else:
            # Other ranks of this host may still multiply the sums that its leader measures.
            self._fabric.neighbours.barrier("gradients of this host to be multiplied")
            self._exchange.measure(self._multiplied)
            self._multiplied.clear()
        self._exchange.gather_norms(self._ranks.step)
        self._fabric.barrier("the norms of the gradients")
        # After the barrier the leader has written the norms.
        self._ranks.publish(self._ranks.filled())
        self._fabric.neighbours.barrier("the norms of the gradients to be read")  # see `RankGradients.filled`

    def _sum_all(self) -> None:
        """Block until every host has the summed gradients of the elements that it updates."""
        if self._phase is Phase.ADDING:  # this rank had no gradient in the last micro-batch, which has ended
            self._exchange.start(self._ranks.step, self._ranks.sums.turns.micro_batch - 1)
        # The exchange ends before second gradients, which are added to the sums of all hosts.
        self._exchange.finish(self._ranks.step)
        self._add_second()
        self._phase = Phase.SUMMED

    def _add_second(self) -> None:
        """Send second gradients of the last micro-batch to all hosts. Add them in the order of ranks."""
        if not any(self._fabric.gather(float(len(self._second)))):
            return
        for second in self._fabric.gather_objects(dict(self._second), dict[ParamKey, torch.Tensor]):
            self._exchange.add(second, self._ranks.step)
        self._second.clear()

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        return self._ranks.norm(keys)

    def commit(self, keys: Iterable[ParamKey], stages: Collection[int]) -> None:
        self._ranks.commit(keys, stages)

    def take(self, stage: int) -> Gradients | None:
        return self._ranks.take(stage)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        self._ranks.put_back(stage, gradients)

    def drop(self, key: ParamKey) -> None:
        self._ranks.drop(key)

    def discard(self) -> None:
        self._ranks.discard()
        self._phase = Phase.ADDING
        self._second.clear()
        self._multiplied.clear()

    def borrow(self, key: ParamKey) -> torch.Tensor | None:
        if key in self.status.present:
            self._exchange.spread(key)
            self._fabric.neighbours.barrier("a gradient of all hosts")
        return self._ranks.borrow(key)

    def loop_tensor(self, key: ParamKey, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def multiply(self, key: ParamKey, factor: Callable[[], torch.Tensor]) -> None:
        if key not in self.status.present:
            return
        self._multiplied.add(key)
        if self._ranks.sums.is_mine(key):
            self._exchange.multiply(key, factor)

    def close(self) -> None:
        self._exchange.close()  # first: its thread reads the sums
        self._ranks.close()
