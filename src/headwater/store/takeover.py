"""Copying of optimizer state and gradients to a new store, when the model or plan changes during training."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.core.stage import ParamKey
from headwater.store.named import keys_by_name
from headwater.store.store import WeightStore


def take_over(store: WeightStore, before: WeightStore, old_names: Mapping[str, str]) -> None:
    """Copy optimizer state and gradients from the old store `before` to the new store.

    An open transaction continues in the new store; commits that it has made cannot be undone any more.

    Args:
        store: the new store, which already holds the weights.
        before: the store that it replaces.
        old_names: name in `store` -> name in `before`, for the parameters that are in both.
    """
    theirs = keys_by_name(before.stages)
    pairs = {
        key: theirs[old_names[name]] for name, key in keys_by_name(store.stages).items() if name in old_names
    }
    for key, there in pairs.items():
        _take_over_param(store, key, before, there)
    remembered = before.gradients.status.remembered
    present = store.gradients.status.present
    # The transaction begins after the copies: they are the state to which a roll-back returns.
    store.begin_transaction([key for key, there in pairs.items() if there in remembered and key in present])
    # The weights from before these commits are not in the new store.
    if before.ledger.has_commits:
        store.ledger.keep_all()


def _take_over_param(store: WeightStore, key: ParamKey, before: WeightStore, there: ParamKey) -> None:
    layout = store.rule.state_layout(store.spec(key))
    if layout == before.rule.state_layout(before.spec(there)):
        for name in layout:
            store.parameters.write_param(key, before.parameters.read_param(there, name), name)
        scalars = store.scalars.by_stage[key[0]]
        scalars[key[1]] = before.scalars.by_stage[there[0]][there[1]]
    gradient = before.borrow_gradient(there)
    if gradient is not None:
        store.set_gradient(key, gradient)
    store.gradients.status.take_over(key, before.gradients.status, there)
