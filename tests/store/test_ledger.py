"""The ledger of commits: pending updates, transactions and undoing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.store.ledger import Ledger
from headwater.store.update import Part, Update

UPDATE = Update(0, {})


def commit(ledger, *keys):
    """Commit the gradients of parameters."""
    ledger.num_commits += 1
    stages = {}
    for stage, param in keys:
        stages.setdefault(stage, {})[param] = Part(ledger.num_commits, UPDATE, None)
        ledger.take_gradients([(stage, param)])
    for stage, parts in stages.items():
        ledger.add(stage, parts, ledger.num_commits)


def test_an_update_is_pending_until_it_is_applied():
    ledger = Ledger()
    commit(ledger, (0, 0), (2, 1))
    assert ledger.stages == [0, 2] and 2 in ledger and 1 not in ledger
    assert ledger.due(0, up_to=0) is None
    assert ledger.due(0).number == 1
    assert ledger.apply(2).parts.keys() == {1}
    assert ledger.waiting() == {(0, 0)}


def test_a_later_commit_joins_a_pending_one_of_the_same_stage():
    ledger = Ledger()
    commit(ledger, (0, 0))
    commit(ledger, (0, 1))
    assert {param: part.number for param, part in ledger.due(0).parts.items()} == {0: 1, 1: 2}
    assert ledger.due(0).number == 2


def test_undoing_keeps_the_parts_of_earlier_commits_under_the_newest_number():
    ledger = Ledger()
    commit(ledger, (0, 0))
    ledger.begin()
    commit(ledger, (0, 1), (1, 0))
    undone = ledger.undo()
    assert ledger.due(0).number == 2 and ledger.due(0).parts.keys() == {0}
    assert undone.emptied == {1: 2} and undone.keys == {(0, 1), (1, 0)}
    assert undone.is_complete and undone.taken == set()
    assert ledger.apply(1) is None


def test_a_commit_with_which_a_stage_was_used_is_kept():
    ledger = Ledger()
    ledger.begin()
    commit(ledger, (0, 0))
    commit(ledger, (1, 0))
    assert ledger.has_commits
    ledger.apply(0)
    assert ledger.last_kept == 1
    undone = ledger.undo()
    assert not undone.is_complete and undone.taken == {(0, 0)}
    assert undone.keys == {(1, 0)} and undone.emptied == {1: 2}
    ledger.note_all_used()
    assert ledger.last_kept == 2


def test_commits_of_a_replaced_store_cannot_be_undone():
    ledger = Ledger()
    ledger.begin()
    ledger.keep_all()
    assert not ledger.undo().is_complete


class Model(RuleBasedStateMachine):
    """A ledger, and a simple model of it: for each commit, lists of applied and pending updates."""

    def __init__(self):
        super().__init__()
        self.ledger, self.waiting, self.used, self.mark = Ledger(), {}, 0, 0

    @rule(keys=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1))
    def commit(self, keys):
        for key in keys:
            if key in self.waiting:  # as the store does before it adds a gradient
                self.apply(key[0])
        commit(self.ledger, *sorted(keys))
        self.waiting.update(dict.fromkeys(keys, self.ledger.num_commits))

    @rule(stage=st.integers(0, 2))
    def apply(self, stage):
        there = {key: number for key, number in self.waiting.items() if key[0] == stage}
        if there:
            pending = self.ledger.apply(stage)
            assert {(stage, param): part.number for param, part in pending.parts.items()} == there
            self.used = max(self.used, pending.number)
            self.waiting = {key: number for key, number in self.waiting.items() if key[0] != stage}

    @rule()
    def begin(self):
        self.ledger.begin()
        self.mark = self.ledger.num_commits

    @rule()
    def roll_back(self):
        last = self.ledger.last_kept
        assert last == max(self.mark, self.used)
        undone = self.ledger.undo()
        assert undone.is_complete == (last == self.mark)
        assert undone.keys == {key for key, number in self.waiting.items() if number > last}
        self.waiting = {key: number for key, number in self.waiting.items() if number <= last}
        assert undone.emptied.keys() == {key[0] for key in undone.keys} - {key[0] for key in self.waiting}

    @invariant()
    def the_same_updates_wait(self):
        assert self.ledger.waiting() == self.waiting.keys()
        assert set(self.ledger.stages) == {stage for stage, _ in self.waiting}


TestLedger = Model.TestCase
TestLedger.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
