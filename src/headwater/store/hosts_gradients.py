"""Gradients of ranks on several hosts: summed on each host, then sent to the host that updates with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.store.exchange import Runs
from headwater.store.gradients import ParamKey, gradient_norm
from headwater.store.shared_gradients import SharedGradientSum
from headwater.store.sharing import Sharing
from headwater.store.sums import Sums


class HostsGradientSum(SharedGradientSum):
    """Sums the gradients of a host's ranks in shared memory, and then those of all hosts where they are used.

    As soon as all ranks of the host have added to the sums of a stage, in the step's last micro-batch, its
    leader sends every other host the elements which that one updates, and adds up what it receives, in the
    hosts' order and in fp32; so the bits are the same each time. This happens on a thread of its own while
    the backward goes on; stages go from the last to the first. What travels is in the wire's dtype.

    Args:
        stages: the stages.
        fabric: the ranks.
        sums: where those of this host lie.
        sharing: says which host updates which elements.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        fabric: Fabric,
        sums: Sums,
        sharing: Sharing,
    ) -> None:
        super().__init__(stages, fabric, sums)
        self._runs = [[self._runs_of(stage, h, sharing) for h in range(fabric.num_hosts)] for stage in stages]
        self._link = fabric.connect("gradients")
        self._exchange = None if self._link is None else self._exchange_by(self._link)
        self._exchanged = Board(fabric, len(stages))  # the step whose sums of a stage are those of all hosts
        self._squares = torch.zeros(len(self._keys), dtype=torch.float64)  # of the norms of this host's part
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="headwater-exchange")
        self._sending: list[Future[None]] = []
        self._is_last = False  # the micro-batch that is under way
        self._summed = -1  # the step whose sums are those of all hosts
        self._multiplied: set[ParamKey] = set()  # since they were measured

    def _runs_of(self, stage: StageSpec, host: int, sharing: Sharing) -> Runs:
        runs = []
        for param in range(len(stage.params)):
            run = sharing.host_run(stage.index, param, host)
            if (stage.index, param) in self._slots and run.start < run.stop:
                runs.append(((stage.index, param), run.start, run.stop))
        return runs

    # in

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        if last and not self._is_last:
            self._is_last = True
            self._start_sending(self._rounds)
        return super().add(stage, param, gradient, last=last)

    def end_micro_batch(self) -> None:
        late = dict(self._late)
        if self._is_last:  # the sums may have been sent already
            self._late.clear()
        super().end_micro_batch()
        self._late.update(late if self._is_last else {})

    def _start_sending(self, round_: int) -> None:
        """Send what this round of turns completes."""
        if self._link is not None:
            for stage in reversed(self._stages):
                self._sending.append(
                    self._sender.submit(self._exchange_stage, stage.index, round_, self._step)
                )

    def _exchange_stage(self, stage: int, round_: int, step: int) -> None:
        for key in (key for key in self._keys if key[0] == stage):
            slot = self._slots[key]
            what = f"the gradient of {self._stages[stage].params[key[1]].name}"
            self._turns.wait(slot, (round_ + 1) * self._fabric.local_size, what)
            if self._written.read(slot) != step:  # no rank here has got one
                self._sums.clear(key)
        assert self._exchange is not None, "leaders send"
        self._exchange.reduce(self._runs[stage])
        for key, start, stop in self._runs[stage][self._fabric.host]:
            self._squares[self._slots[key]] = gradient_norm(self._sums.read(key, start, stop)) ** 2
        self._sums.rest(stage)
        self._exchanged.post(stage, step)

    # complete

    def _measure_all(self) -> None:
        if self._summed != self._step:
            self._sum_all()
            self._summed = self._step
        else:
            self._measure_multiplied()
        if self._link is not None:
            here = [float(self._written.read(slot) == self._step) for slot in self._slots.values()]
            every = self._link.gather(torch.cat([self._squares, torch.tensor(here, dtype=torch.float64)]))
            squares, present = every.sum(0).split(len(self._keys))
            self._measured.copy_(squares.sqrt())
            for slot in present.nonzero().flatten().tolist():
                self._written.post(slot, self._step)
        self._fabric.barrier("the norms of the gradients")

    def _sum_all(self) -> None:
        """Return when every host has the sums of what it updates."""
        if not self._is_last:  # this rank had nothing to add
            self._start_sending(self._rounds - 2)
        self._is_last = False
        sending, self._sending = self._sending, []
        for each in sending:
            each.result()
        for stage in self._stages:
            self._exchanged.wait(
                stage.index, self._step, f"the gradient of stage {stage.name!r} of all hosts"
            )
        self._add_late()

    def _measure_multiplied(self) -> None:
        """Measure anew what other ranks of this host may have multiplied."""
        self._fabric.neighbours.barrier("gradients of this host to be multiplied")
        for key in self._multiplied if self._link is not None else ():
            for start, stop in self._own_runs(key):
                self._squares[self._slots[key]] = gradient_norm(self._sums.read(key, start, stop)) ** 2
        self._multiplied.clear()

    def _own_runs(self, key: ParamKey) -> list[tuple[int, int]]:
        """The elements that this host updates, if there are any."""
        runs = self._runs[key[0]][self._fabric.host]
        return [(start, stop) for owned, start, stop in runs if owned == key]

    def _add_late(self) -> None:
        """Gradients that came when the sums may have been sent: rare, and sent by another, slower way."""
        if not any(self._fabric.gather(float(len(self._late)))):
            return
        for late in self._fabric.gather_objects(
            dict(self._late), dict[ParamKey, torch.Tensor]
        ):  # in the ranks' order
            for key, gradient in late.items() if self._link is not None else ():
                for start, stop in self._own_runs(key):
                    with self._sums.changing(key, start, stop) as own:
                        own += gradient.reshape(-1)[start:stop]
                    self._squares[self._slots[key]] = gradient_norm(own) ** 2
                self._written.post(self._slots[key], self._step)
        self._late.clear()

    # sums that are looked at and changed before they are used

    def expose(self, stage: int, param: int) -> torch.Tensor | None:
        """A copy of the sum of one parameter, after `complete`; all ranks ask for it at once."""
        if (stage, param) in self.present:
            if self._exchange is not None:
                runs = self._runs[stage]
                self._exchange.spread([[run for run in its if run[0] == (stage, param)] for its in runs])
            self._fabric.neighbours.barrier("a gradient of all hosts")
        return super().expose(stage, param)

    def multiply(self, stage: int, param: int, factor: Callable[[], torch.Tensor]) -> None:
        key = (stage, param)
        if key not in self.present:
            return
        self._multiplied.add(key)
        for start, stop in self._own_runs(key) if self._is_mine(self._slots[key]) else ():
            with self._sums.changing(key, start, stop) as own:
                own.mul_(factor().reshape(-1)[start:stop])

    def discard(self) -> None:
        super().discard()
        self._late.clear()
        self._multiplied.clear()

    def close(self) -> None:
        self._sender.shutdown(wait=True, cancel_futures=True)
        super().close()
