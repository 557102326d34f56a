"""A step commits for all participants or for none of them."""

import gc
import weakref

import pytest

import headwater.api.transaction
from headwater.api.transaction import is_open, register, transaction, unregister, when_committed


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    monkeypatch.setattr(headwater.api.transaction, "_participants", weakref.WeakValueDictionary())


class Account:
    """A participant whose number is restored when its step is aborted."""

    def __init__(self, log=None, *, fails_at=None) -> None:
        self.value = 0
        self.log = [] if log is None else log
        self._fails_at = fails_at
        register(self)

    def _note(self, verb):
        self.log.append((verb, self))
        if verb == self._fails_at:
            raise RuntimeError(f"failed at {verb}")

    def begin_step(self):
        self._before = self.value
        self._note("begin")

    def end_step(self):
        self._note("end")

    def abort_step(self):
        self.value = self._before
        self._note("abort")

    @property
    def verbs(self):
        return [verb for verb, account in self.log if account is self]


def test_a_transaction_without_errors_commits():
    account = Account()
    with transaction():
        assert is_open()
        account.value += 1
    assert account.value == 1 and account.verbs == ["begin", "end"] and not is_open()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_step_is_undone_for_all_and_the_next_one_counts(error):
    accounts = [Account(), Account()]
    with pytest.raises(error), transaction():
        for account in accounts:
            account.value += 1
        raise error
    assert [account.value for account in accounts] == [0, 0] and not is_open()
    with transaction():
        accounts[0].value += 1
    assert [account.value for account in accounts] == [1, 0]


def test_an_inner_transaction_is_part_of_the_outer_one():
    account = Account()
    with pytest.raises(ValueError), transaction():
        with transaction():
            account.value += 1
        assert account.verbs == ["begin"], "the inner one ends nothing"
        raise ValueError
    assert account.value == 0


def test_a_participant_that_joins_during_a_step_is_part_of_it():
    accounts = []
    with pytest.raises(ValueError), transaction():
        accounts.append(Account())
        register(accounts[0])  # a second call has no effect
        accounts[0].value = 5
        raise ValueError
    assert accounts[0].verbs == ["begin", "abort"] and accounts[0].value == 0


def test_participants_are_weakly_referenced_and_can_leave():
    log = []
    account = Account(log)
    kept = Account(log)
    del account
    gc.collect()
    unregister(kept)
    unregister(kept)  # once is enough
    with transaction():
        pass
    assert log == []


def test_a_failing_begin_aborts_participants_that_have_begun():
    log = []
    first, second, third = Account(log), Account(log, fails_at="begin"), Account(log)
    with pytest.raises(RuntimeError, match="begin"), transaction():
        pytest.fail("the step must not run")
    assert log == [("begin", first), ("begin", second), ("abort", first)]
    assert not is_open() and third.verbs == []


def test_a_failing_end_aborts_participants_that_have_not_ended():
    log = []
    first, second, third = Account(log), Account(log, fails_at="end"), Account(log)
    with pytest.raises(RuntimeError, match="end"), transaction():
        first.value = third.value = 1
    assert log[3:] == [("end", third), ("end", second), ("abort", first)]
    assert (first.value, third.value) == (0, 1)


def test_a_failing_abort_does_not_stop_the_others_from_aborting():
    first, _second, third = Account(), Account(fails_at="abort"), Account()
    with pytest.raises(RuntimeError, match="abort") as caught, transaction():
        first.value = third.value = 1
        raise ValueError("the step's own")
    assert (first.value, third.value) == (0, 0)
    assert "the step's own" in str(caught.value.__context__)


def test_actions_wait_for_the_commit_and_keep_their_order():
    account, seen = Account(), []
    when_committed(lambda: seen.append("at once"))
    with transaction():
        when_committed(lambda: seen.append(("first", account.verbs[-1], is_open())))
        with transaction():
            when_committed(lambda: seen.append("second"))
        assert seen == ["at once"]
    assert seen == ["at once", ("first", "end", False), "second"]


def test_actions_of_an_aborted_step_never_happen():
    seen = []
    with pytest.raises(ValueError), transaction():
        when_committed(lambda: seen.append(1))
        raise ValueError
    with transaction():
        pass
    assert seen == []


def test_an_action_that_fails_neither_undoes_the_step_nor_stops_the_next():
    account, seen = Account(), []
    with pytest.raises(KeyError) as caught, transaction():
        account.value = 1
        when_committed(lambda: 1 / 0)
        when_committed(lambda: seen.append(1))
        when_committed(lambda: {}["key"])
    assert account.value == 1 and seen == [1]
    assert isinstance(caught.value.__context__, ZeroDivisionError)
