"""Gradients of ranks on several hosts in a loop of one's own: put together when somebody asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.fabric.membership import is_alone
from headwater.store.exchange import Runs, divide
from headwater.store.gradients import ParamKey
from headwater.store.loop_gradients import LoopGradientSum
from headwater.store.sums import Sums


class HostsLoopGradientSum(LoopGradientSum):
    """Sums of a host's ranks, and on top of them those of all hosts.

    What ranks add stays on their host until a sum is asked for: by whoever looks at a gradient, by a commit,
    or where a step begins that may be undone. Then the leaders send what is new, each adds up an equal part
    of the elements, and all get the result: so every host has the same bits, and from there on it is as with
    ranks of one host. Where more is added, the first host carries the sum so far, the others begin anew.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        sums: where those of this host lie.
    """

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, sums: Sums) -> None:
        super().__init__(stages, fabric.neighbours, sums)
        self._host, self._num_hosts = fabric.host, fabric.num_hosts
        self._link = fabric.connect("gradients")
        self._exchange = None if self._link is None else self._exchange_by(self._link)
        self._new: set[ParamKey] = set()  # added to since they were put together
        self._together = Board(self._fabric, 1)  # how often that was done
        self._times = 0

    def _before_adding(
        self, key: ParamKey, copy: torch.Tensor | None, current: int
    ) -> Callable[[], None] | None:
        slot, is_first = self._slots[key], key not in self._new
        self._new.add(key)
        if self._host == 0:
            return super()._before_adding(key, copy, current)
        is_of_all = is_first and self._written.read(slot) == current
        begins_anew = copy is not None or is_of_all
        return functools.partial(self._written.post, slot, 0) if begins_anew else None

    def _is_there(self, key: ParamKey) -> bool:
        if key in self._new:
            # Within a backward other parameters have no gradient yet.
            self._put_together([key] if self._received else sorted(self._new))
        return super()._is_there(key)

    def _put_together(self, keys: Sequence[ParamKey]) -> None:
        """Let these sums be those of all hosts, on every host; all ranks come here."""
        if is_alone():
            raise StreamError(
                "a gradient is asked for on one rank, and the hosts have parts of it",
                where="step closure",
                remedy="look at it in the loop, where all ranks do",
            )
        self._new.difference_update(keys)
        self._times += 1
        is_there = super()._is_there
        here = [is_there(key) for key in keys]
        if self._link is not None:
            anywhere = self._link.gather(torch.tensor(here)).any(0).tolist()
            for key, in_part, in_all in zip(keys, here, anywhere, strict=True):
                if in_all and not in_part:
                    self._sums.clear(key)
            self._exchange_sums([key for key, there in zip(keys, anywhere, strict=True) if there])
            self._together.post(0, self._times)
        self._together.wait(0, self._times, "the gradients of all hosts")

    def _exchange_sums(self, keys: Sequence[ParamKey]) -> None:
        assert self._exchange is not None, "leaders send"
        whole: Runs = [(key, 0, self._sums.numel(key)) for key in keys]
        runs = [divide(whole, host, self._num_hosts) for host in range(self._num_hosts)]
        self._exchange.reduce(runs)
        self._exchange.spread(runs)
        for key in keys:
            self._written.post(self._slots[key], self._current[key])

    def close(self) -> None:
        super().close()
        if self._link is not None:
            self._link.close()
