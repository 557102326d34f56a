"""A store that takes the place of another, as the model or its plan has changed in the middle of training."""

from __future__ import annotations

from headwater.store.gradients import ParamKey
from headwater.store.named import keys_by_name
from headwater.store.parameters import read_param, write_param
from headwater.store.store import WeightStore


def take_over(store: WeightStore, before: WeightStore) -> None:
    """Let parameters of the same name have the optimizer state and the gradient that they had before.

    A transaction that is under way goes on; commits that it has made cannot be undone any more.

    Args:
        store: has their weights already.
        before: the one that it replaces.
    """
    theirs = keys_by_name(before.stages)
    for stage in store.stages:
        for index, spec in enumerate(stage.params):
            if spec.name in theirs:
                _take_over_param(store, (stage.index, index), before, theirs[spec.name])
    names = {before.spec(key).name for key in before.gradients.remembered}
    store.begin_transaction([key for key in store.gradients.present if store.spec(key).name in names])
    if before.ledger.has_commits:
        store.ledger.keep_all()


def _take_over_param(store: WeightStore, key: ParamKey, before: WeightStore, there: ParamKey) -> None:
    layout = store.rule.state_layout(store.spec(key))
    if layout == before.rule.state_layout(before.spec(there)):
        for name in layout:
            write_param(store, key, read_param(before, there, name), name)
        scalars = store.scalars(key[0])
        scalars[key[1]] = before.scalars(there[0])[there[1]]
    gradient = before.gradients.expose(*there)
    if gradient is not None:
        store.set_gradient(*key, gradient)
    if there in before.gradients.spent:
        store.gradients.spend([key])
