"""Gradient sums of several hosts in a user's loop: the hosts' sums are added up when one is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.fabric.membership import require_all_ranks
from headwater.store.gradients.exchange import Exchange, Runs, divide
from headwater.store.gradients.rank_sums import RankSums


@final
class HostAssembly:
    """Adds up the gradient sums of several hosts when a sum is read.

    Gradients that ranks add stay on their host until their sum is read: by the user's loop, by a commit, or
    where a step begins that may be undone. Then the leaders send what is new. Each leader adds up an equal
    part of the elements, and all receive the result, so that every host has the same bits. When more is added
    afterwards, the first host carries the sum so far, and the other hosts begin with an empty sum.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        sums: the sums of this host.
    """

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, sums: RankSums) -> None:
        self._sums = sums
        self._host, self._num_hosts = fabric.host, fabric.num_hosts
        self._link = fabric.connect("gradients")
        self._exchange = None if self._link is None else Exchange(self._link, sums.storage, stages)
        self._new: set[ParamKey] = set()  # sums with additions since they were put together
        self._together = Board(fabric.neighbours, 1)  # how many times sums were put together
        self._times = 0

    def begin(
        self, key: ParamKey, generation: int, put_back: Callable[[], None] | None
    ) -> Callable[[], None] | None:
        """Return a function that the first rank of this host calls before more is added to a sum, or `None`.

        Args:
            key: the parameter.
            generation: the generation of its sum.
            put_back: writes the copy that has replaced the sum, if there is one.
        """
        is_first = key not in self._new
        self._new.add(key)
        if self._host == 0:
            return put_back
        is_of_all = is_first and self._sums.has(key, generation)
        begins_empty = put_back is not None or is_of_all
        return functools.partial(self._sums.note_written, key, 0) if begins_empty else None

    def before_reading(
        self, key: ParamKey, generations: Mapping[ParamKey, int], has_here: Callable[[ParamKey], bool]
    ) -> None:
        """Add up the hosts' sums of `key`, unless that was done since the last addition.

        Outside of a backward, all other sums with new additions are added up too. All ranks call this
        function together.

        Args:
            key: the parameter.
            generations: the generation of each sum.
            has_here: true if a rank of this host has added to a sum; blocks until all of them have.
        """
        if key in self._new:
            # Inside a backward only this sum is added up: other parameters may have no gradient yet.
            keys = [key] if self._sums.turns.has_begun else sorted(self._new)
            self._put_together(keys, generations, has_here)

    def _put_together(
        self,
        keys: Sequence[ParamKey],
        generations: Mapping[ParamKey, int],
        has_here: Callable[[ParamKey], bool],
    ) -> None:
        require_all_ranks("a gradient")
        # This comes before the exchange, so that additions of the next backward count as new.
        self._new.difference_update(keys)
        self._times += 1
        here = [has_here(key) for key in keys]
        if self._link is not None:
            # A host without a gradient still takes part: its sum counts as zeros.
            anywhere = self._link.gather(torch.tensor(here, device="cpu")).any(0).tolist()
            for key, in_part, in_all in zip(keys, here, anywhere, strict=True):
                if in_all and not in_part:
                    self._sums.storage.clear(key)
            found = [key for key, there in zip(keys, anywhere, strict=True) if there]
            self._exchange_sums(found)
            for key in found:
                self._sums.note_written(key, generations[key])
            # The other ranks of the host may read now.
            self._together.post(0, self._times)
        self._together.wait(0, self._times, "the gradients of all hosts")

    def _exchange_sums(self, keys: Sequence[ParamKey]) -> None:
        assert self._exchange is not None, "only leaders send"
        whole: Runs = [(key, 0, self._sums.storage.sizes.numel(key)) for key in keys]
        runs = [divide(whole, host, self._num_hosts) for host in range(self._num_hosts)]
        self._exchange.reduce(runs)
        self._exchange.spread(runs)

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
