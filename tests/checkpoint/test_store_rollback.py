"""When a commit is undone, an earlier commit of the same stage is still applied."""

import torch
from checkpoint_runs import assert_same, fetch_stage, make_store

from headwater.store.update import Update

UPDATE = Update(1, {"lr": 0.1})


def committed(store, *, undo_second):
    """Commit an update of stage 0 and, if asked to, commit and undo a second one; return the store."""
    store.begin_step()
    fetch_stage(store, 0)
    for index, spec in enumerate(store.stages[0].params):
        store.add_gradient((0, index), torch.ones(spec.shape), last=True)
    store.end_micro_batch()
    store.commit(UPDATE, {(0, 0): UPDATE})
    if undo_second:
        store.begin_transaction()
        store.commit(UPDATE, {(0, 1): UPDATE})
        assert store.roll_back()
    fetch_stage(store, 0)
    return store


def test_undoing_one_optimizer_keeps_the_update_of_another():
    assert_same(committed(make_store(), undo_second=True), committed(make_store(), undo_second=False))
