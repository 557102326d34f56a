"""The queue of closures runs each once, in order, not before its values have arrived, and stays short."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.api.closures import Call, ClosureQueue, host_call


class FakeEvent:
    """The event of a copy, which is complete when the test sets it or when a caller waits for it."""

    def __init__(self, complete=False) -> None:
        self.complete = complete
        self.waits = 0

    def query(self):
        return self.complete

    def synchronize(self):
        self.waits += not self.complete
        self.complete = True


def call(function, *args, event=None, **kwargs):
    return Call(function, args, kwargs, () if event is None else (event,))


def test_a_call_with_available_values_runs_at_once():
    seen = []
    ClosureQueue().add(
        call(lambda *args, **kwargs: seen.append((args, kwargs)), 1, event=FakeEvent(True), b=2)
    )
    assert seen == [((1,), {"b": 2})]


def test_a_late_value_delays_the_calls_behind_it():
    queue, seen, events = ClosureQueue(), [], [FakeEvent(), FakeEvent(True), FakeEvent()]
    for number, event in enumerate(events):
        queue.add(call(seen.append, number, event=event))
    assert seen == []
    events[0].complete = True
    queue.run_ready()
    assert seen == [0, 1]
    queue.run_all()
    assert seen == [0, 1, 2]
    assert [event.waits for event in events] == [0, 0, 1], "only the last one was waited for"


def test_a_full_queue_waits_only_for_its_oldest_call():
    queue, seen, events = ClosureQueue(longest=2), [], [FakeEvent() for _ in range(4)]
    for number, event in enumerate(events):
        queue.add(call(seen.append, number, event=event))
    assert seen == [0, 1]
    assert [event.complete for event in events] == [True, True, False, False]


@given(
    st.lists(st.tuples(st.sampled_from(["add", "ready", "all", "complete"]), st.integers(0, 9))),
    st.integers(0, 4),
)
def test_calls_always_run_once_and_in_order(actions, longest):
    queue, seen, events = ClosureQueue(longest), [], []
    for action, which in actions:
        if action == "add":
            events.append(FakeEvent())
            queue.add(call(seen.append, len(events) - 1, event=events[-1]))
        elif action == "ready":
            queue.run_ready()
        elif action == "all":
            queue.run_all()
            assert len(seen) == len(events)
        elif events:
            events[which % len(events)].complete = True
        assert len(events) - len(seen) <= longest
    queue.run_all()
    assert seen == list(range(len(events)))


def failing(message):
    def fail(*_args):
        raise ZeroDivisionError(message)

    return call(fail)


def test_a_failure_names_the_closure_and_later_closures_still_run():
    queue, seen, event = ClosureQueue(), [], FakeEvent()
    queue.add(call(seen.append, 1, event=event))
    queue.add(failing("first"))
    queue.add(call(seen.append, 2))
    event.complete = True
    with pytest.raises(ZeroDivisionError, match="first") as caught:
        queue.run_ready()
    assert "fail" in caught.value.__notes__[0] and seen == [1]
    queue.run_ready()
    assert seen == [1, 2]


def test_all_closures_run_even_if_some_fail():
    queue, seen, event = ClosureQueue(), [], FakeEvent()
    queue.add(call(seen.append, 1, event=event))
    for later in [failing("first"), call(seen.append, 2), failing("second"), call(seen.append, 3)]:
        queue.add(later)
    with pytest.raises(ZeroDivisionError, match="second") as caught:
        queue.run_all()
    assert "first" in str(caught.value.__context__) and seen == [1, 2, 3]
    queue.run_all()
    assert seen == [1, 2, 3]


def test_run_now_runs_after_all_waiting_calls_even_if_they_fail():
    queue, seen, event = ClosureQueue(), [], FakeEvent()
    queue.add(call(seen.append, 1, event=event))
    queue.add(failing("first"))
    with pytest.raises(ZeroDivisionError):
        queue.run_now(call(seen.append, "now"))
    assert seen == [1, "now"]


def test_a_closure_cannot_run_the_queue_that_runs_it():
    queue, seen, event = ClosureQueue(), [], FakeEvent()

    def nosy():
        seen.append("begin")
        assert queue.is_running
        queue.run_all()
        queue.run_ready()
        seen.append("end")

    queue.add(call(nosy, event=event))
    queue.add(call(seen.append, "next"))
    queue.run_all()
    assert seen == ["begin", "end", "next"] and not queue.is_running


def test_values_are_copies_without_a_graph():
    weight = torch.nn.Parameter(torch.arange(6.0))
    view = (weight * 2)[2:4]
    made = host_call(print, (view, {"w": weight}), {"text": "as it is"})
    copied, nested = made.args
    with torch.no_grad():
        weight.zero_()
    assert copied.tolist() == [4.0, 6.0] and nested["w"].tolist() == list(range(6))
    for tensor in (copied, nested["w"]):
        assert type(tensor) is torch.Tensor and not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert made.kwargs == {"text": "as it is"} and made.is_ready()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_values_are_copied_without_blocking():
    value = torch.ones(2**20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    made = host_call(print, (value,), {})
    value.zero_()
    assert not made.is_ready(), "the call came back before the device got there"
    made.run()
    (copied,) = made.args
    assert copied.is_pinned() and copied.device.type == "cpu" and copied.sum() == 2**20
