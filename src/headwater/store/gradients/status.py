"""The status of gradient sums: which are present, which are consumed, and their norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from headwater.core.stage import ParamKey

NO_NORMS: Mapping[ParamKey, Tensor] = {}
"""The norms of no sums."""


@final
class GradientStatus:
    """Which gradient sums of a model are present or consumed, and their norms. Holds no gradient itself.

    Attributes:
        present: parameters with a sum that no commit has taken.
        consumed: parameters whose sum an optimizer has used, and whose sum was not dropped since, each with
            the number of the `consume` call. A gradient that arrives for a consumed sum is dropped: plain
            PyTorch would add it to the old gradient, whose values the store no longer has.
        overwritten: parameters whose consumed sum the loop has overwritten by new values, each with the
            number that it had in `consumed`. As in plain PyTorch, the tensor that the loop got after the step
            is still the gradient.
        is_stepping: true while torch's optimizer runs after a commit has taken its gradients. It must find no
            gradients, so consumed ones look as if they were dropped.
        sparse: parameters whose newest sum is or was a sparse tensor.
        norms: the 2-norms of sums that have been measured.
        first_bad: the first stage whose gradient was not finite.
        remembered: the sums that were present at the last `remember`, whether or not they still are.
    """

    def __init__(self) -> None:
        self.present: set[ParamKey] = set()
        self.consumed: dict[ParamKey, int] = {}
        self.overwritten: dict[ParamKey, int] = {}
        self._num_consumed = 0
        self.is_stepping = False
        self.sparse: set[ParamKey] = set()
        self.norms: dict[ParamKey, Tensor] = {}
        self.first_bad: int | None = None
        self.remembered: frozenset[ParamKey] = frozenset()
        self._consumed_before: tuple[Mapping[ParamKey, int], Mapping[ParamKey, int]] = {}, {}

    def arrive(self, key: ParamKey, *, is_sparse: bool) -> None:
        """Record that a sum is present and has changed, so that its norm is not known."""
        self.present.add(key)
        self.norms.pop(key, None)
        if is_sparse:
            self.sparse.add(key)
        else:
            self.sparse.discard(key)

    def measure(self, key: ParamKey, norm: Tensor) -> None:
        """Record the norm of a sum. If it is the first norm that is not finite, record the stage too."""
        self.norms[key] = norm
        # The first to arrive is the first in backward, where the fault began.
        if self.first_bad is None and not bool(norm.isfinite()):
            self.first_bad = key[0]

    def norm(self, keys: Iterable[ParamKey], used: Mapping[ParamKey, Tensor] = NO_NORMS) -> Tensor:
        """Return the global norm of sums, from their recorded norms. Its last bits depend on the order.

        Args:
            keys: the sums.
            used: the norms of sums among `keys` that are not present any more.
        """
        norms = [used[key] if key in used else self.norms[key] for key in keys]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device="cpu")

    def leave(self, key: ParamKey) -> None:
        """Record that a sum is not present any more: a commit has taken it, or it was discarded."""
        self.present.discard(key)
        self.norms.pop(key, None)

    def leave_all(self) -> None:
        """Record that no sum is present any more."""
        self.present.clear()
        self.norms.clear()
        self.first_bad = None

    def consume(self, keys: Iterable[ParamKey]) -> None:
        """Record that an optimizer has used these sums. Reading them is an error until they are discarded."""
        self._num_consumed += 1
        for key in keys:
            self.consumed[key] = self.overwritten.pop(key, self._num_consumed)

    def take_over(self, key: ParamKey, before: GradientStatus, there: ParamKey) -> None:
        """Copy what is known of the last sum of a parameter from the status of another store.

        Consumed sums keep their numbers: tensors that the loop got after the step still refer to them.

        Args:
            key: the parameter in the store of this status.
            before: the status of the other store.
            there: the same parameter in the other store.
        """
        self._num_consumed = max(self._num_consumed, before._num_consumed)
        if there in before.consumed:
            self.consumed[key] = before.consumed[there]
        if there in before.overwritten:
            self.overwritten[key] = before.overwritten[there]
        if there in before.sparse:
            self.sparse.add(key)

    def overwrite_consumed(self, key: ParamKey, number: int) -> None:
        """Record that the loop has written new values into a consumed sum, which is present again."""
        self.overwritten[key] = number

    def drop_consumed(self, key: ParamKey) -> None:
        """Record that a parameter has no consumed sum any more, because it was dropped or replaced."""
        self.consumed.pop(key, None)
        self.overwritten.pop(key, None)

    def drop_all_consumed(self) -> None:
        """Record that no parameter has a consumed sum any more."""
        self.consumed.clear()
        self.overwritten.clear()

    def remember(self, keys: Collection[ParamKey] | None) -> None:
        """Save for `restore` which sums are present, among `keys` if given."""
        self.remembered = frozenset(self.present if keys is None else self.present.intersection(keys))
        self._consumed_before = dict(self.consumed), dict(self.overwritten)

    def restore(self, gone: Iterable[ParamKey]) -> None:
        """Restore the remembered status, except for the sums in `gone`, and discard what was remembered."""
        self.leave_all()
        self.present = set(self.remembered.difference(gone))
        self.consumed, self.overwritten = map(dict, self._consumed_before)
        self.forget()

    def forget(self) -> None:
        """Discard the remembered status."""
        self.remembered, self._consumed_before = frozenset(), ({}, {})
