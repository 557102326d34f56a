"""Every callback gets its events, whichever other callback fails."""

import pytest

from headwater.core.errors import StoreError
from headwater.trainer.callback import Callback
from headwater.trainer.callback_runner import CallbackRunner


class Recording(Callback):
    """A callback that records its events, and fails in some of them."""

    def __init__(self, name, record, failing=()):
        self.name, self.record, self.failing = name, record, failing

    def _note(self, event):
        self.record.append((self.name, event))
        if event in self.failing:
            raise StoreError(f"{self.name} {event}")

    def on_fit_start(self, event):
        self._note("start")

    def on_checkpoint(self, step, path):
        self._note("checkpoint")

    def on_fit_error(self, error):
        self._note("error")

    def on_fit_end(self):
        self._note("end")


def started(*failing):
    record = []
    runner = CallbackRunner([Recording(str(i), record, events) for i, events in enumerate(failing)])
    runner.start(None)
    record.clear()
    return runner, record


def test_the_first_failure_is_kept_and_the_others_are_told_too():
    runner, record = started((), ("checkpoint",), ("checkpoint",))
    runner.call_each(lambda callback: callback.on_checkpoint(1, None))
    assert record == [("0", "checkpoint"), ("1", "checkpoint"), ("2", "checkpoint")]
    assert runner.failure.what == "1 checkpoint"


def test_only_callbacks_that_have_started_are_ended():
    record = []
    runner = CallbackRunner([Recording(str(i), record, ("start",) if i == 1 else ()) for i in range(3)])
    with pytest.raises(StoreError, match="1 start"):
        runner.start(None)
    with runner.ending():
        record.append("work")
    assert record == [("0", "start"), ("1", "start"), "work", ("0", "end")]


@pytest.mark.parametrize("context", ["ending", "reporting"])
def test_all_callbacks_are_called_in_order_if_the_context_and_the_first_callback_fail(context):
    event = "end" if context == "ending" else "error"
    runner, record = started((event,), ())
    entered = runner.ending() if context == "ending" else runner.reporting(ValueError())
    with pytest.raises(StoreError, match=f"0 {event}"), entered:
        raise StoreError("the context")
    assert record == [("0", event), ("1", event)]
