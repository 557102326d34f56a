"""The gradient sums of ranks in a user's loop. A sum lasts until an update takes it or the loop clears it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.gradients.assembly import HostAssembly
from headwater.store.gradients.loans import is_used_elsewhere
from headwater.store.gradients.rank_sums import Beginning, RankSums
from headwater.store.gradients.storage import GradientStorage


@final
class LastingSums:
    """The gradient sums of ranks in a user's loop. A sum that was read is replaced by a copy.

    Each sum lasts, over steps, until `give_up` marks it as empty.

    Reading a sum makes a copy of it, which replaces the sum from then on. All ranks must make the same
    changes to their copies. Before more is added to the sum, the first rank of the host puts its copy back.

    Attributes:
        shared: the sums of this host's ranks, without the copies.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        storage: where the sums of this host lie.
    """

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, storage: GradientStorage) -> None:
        # `together`, because a fast rank could add its next gradient to a sum that another rank still reads.
        self.shared = RankSums(stages, fabric.neighbours, storage, self._begin, together=True)
        self._clock = 1  # grows with every sum that is given up
        self._generation = dict.fromkeys(self.shared.keys, self._clock)
        self._copies: dict[ParamKey, torch.Tensor] = {}
        self._lent: dict[ParamKey, torch.Tensor] = {}
        self._assembly = HostAssembly(stages, fabric, self.shared) if fabric.num_hosts > 1 else None

    def _begin(self, key: ParamKey) -> Beginning:
        """Prepare an addition to a sum: drop this rank's copy of it. Called by `shared` for each addition."""
        copy, generation = self._copy(key), self._generation[key]
        # A loop that reads the gradient again must see the new sum.
        self._lent.pop(key, None)
        self._copies.pop(key, None)
        put_back: Callable[[], None] | None = None
        if copy is not None:
            put_back = functools.partial(self._put_back, key, copy, generation)
        if self._assembly is not None:
            put_back = self._assembly.begin(key, generation, put_back)
        return Beginning(generation, put_back)

    def _put_back(self, key: ParamKey, copy: torch.Tensor, generation: int) -> None:
        self.shared.storage.write(key, copy)
        # This follows the write: as soon as the sum counts as written, the next rank adds to it.
        self.shared.note_written(key, generation)

    def find(self) -> set[ParamKey]:
        """Return the parameters that have a sum. All ranks call this; it blocks until all have added."""
        return {*(key for key in self.shared.keys if self.has(key)), *self._copies}

    def has(self, key: ParamKey) -> bool:
        """True if any rank has added to a sum. Blocks until every rank has finished its additions."""
        if self._assembly is not None:
            self._assembly.before_reading(key, self._generation, self._has_here)
        return self._has_here(key)

    def _has_here(self, key: ParamKey) -> bool:
        self.shared.finish()
        # `finish` comes first: a rank that waits before it has added would keep others waiting.
        self.shared.wait_for_all(key)
        return self.shared.has(key, self._generation[key])

    def is_copied(self, key: ParamKey) -> bool:
        """True if a copy is used instead of the sum."""
        return key in self._copies

    def value(self, key: ParamKey) -> torch.Tensor:
        """Return a sum, or the copy that is used instead of it."""
        copy = self._copy(key)
        return self.shared.whole(key) if copy is None else copy

    def _copy(self, key: ParamKey) -> torch.Tensor | None:
        """Return the copy that is used instead of a sum, or `None`."""
        if key in self._lent:
            # The loop may have given it other memory: `p.grad.data = ...`.
            self._copies[key] = self._lent[key].detach()
        return self._copies.get(key)

    def lend(self, key: ParamKey) -> torch.Tensor | None:
        """Replace a sum by a copy from now on, and return the copy; `None` if nothing was added.

        The caller may change the copy in place.
        """
        if key not in self._copies:
            if key not in self.shared.slots or not self.has(key):
                return None
            self._copies[key] = self.shared.whole(key).clone()
        return self._lent.setdefault(key, self._copies[key].detach())

    def replace(self, key: ParamKey, value: torch.Tensor) -> None:
        """Replace a sum by `value`, which must be the same on all ranks."""
        self._lent[key], self._copies[key] = value, value.detach()

    def take(self, key: ParamKey) -> torch.Tensor | None:
        """Give up a sum for an update. Return the copy that was used instead of the sum, or `None`.

        The update may change the copy in place.
        """
        copy = self._copy(key)
        if copy is not None and key in self._lent:
            del self._copies[key]
            lent = weakref.ref(self._lent.pop(key))
            # The user's loop may still have the lent tensor, or a view of it.
            copy = copy.clone() if lent() is not None or is_used_elsewhere(copy) else copy
        self.give_up(key)
        return copy

    def give_up(self, key: ParamKey) -> None:
        """Mark a sum as empty: the next addition replaces its content."""
        self._lent.pop(key, None)
        self._copies.pop(key, None)
        self._clock += 1
        self._generation[key] = self._clock

    def give_up_all(self) -> None:
        """Give up all sums."""
        for key in {*self.shared.keys, *self._copies}:
            self.give_up(key)

    def close(self) -> None:
        """Release the thread, memory, files and connections."""
        self.shared.close()
        if self._assembly is not None:
            self._assembly.close()
