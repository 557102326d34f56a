"""The recorder keeps begin and end of all work, and a thread does one thing at a time."""

import itertools
import threading
import time

import pytest

from headwater.core.recorder import COMPUTE, DISK_READ, FETCH, UPDATE, WAIT, Recorder

FAR = 1 << 62


def works(events):
    return [(event.kind, event.stage) for event in events]


def test_a_span_interrupts_the_work_around_it():
    recorder = Recorder()
    with recorder.span(COMPUTE, "block"), recorder.span(WAIT, "next", 7):
        pass
    events = recorder.events(0, FAR)
    assert works(events) == [("compute", "block"), ("wait", "next"), ("compute", "block")]
    assert [event.num_bytes for event in events] == [0, 7, 0]
    assert all(before.end == after.begin for before, after in itertools.pairwise(events))


def test_an_error_ends_the_work():
    recorder = Recorder()
    with pytest.raises(ValueError), recorder.span(FETCH):
        raise ValueError
    assert recorder.lane().work is None
    assert works(recorder.events(0, FAR)) == [("fetch", "")]


def test_bytes_that_are_known_at_the_end_are_recorded():
    recorder = Recorder()
    with recorder.span(DISK_READ) as span:
        span.num_bytes = 12
    assert recorder.events(0, FAR)[0].num_bytes == 12


def test_a_range_of_time_has_the_events_that_overlap_with_it():
    recorder = Recorder()
    for kind in (FETCH, UPDATE, WAIT):
        with recorder.span(kind):
            pass
    _, update, wait = recorder.events(0, FAR)
    assert works(recorder.events(update.begin, wait.begin)) == [("update", "")]
    assert works(recorder.events(update.begin, FAR)) == [("update", ""), ("wait", "")]


def test_the_ring_keeps_the_last_events():
    recorder = Recorder(capacity=3)
    for number in range(5):
        with recorder.span(FETCH, str(number)):
            pass
    assert [event.stage for event in recorder.events(0, FAR)] == ["2", "3", "4"]


def test_many_events_are_read_back():
    recorder = Recorder()
    for _ in range(3000):
        with recorder.span(FETCH):
            pass
    assert len(recorder.events(0, FAR)) == 3000


def test_threads_have_their_own_work():
    recorder = Recorder()
    inside, done = threading.Event(), threading.Event()

    def fetch():
        with recorder.span(FETCH, "other"):
            inside.set()
            done.wait()

    thread = threading.Thread(target=fetch, name="fetcher")
    thread.start()
    inside.wait()
    with recorder.span(COMPUTE, "own"):
        pass
    done.set()
    thread.join()
    events = recorder.events(0, FAR)
    assert works(events) == [("compute", "own"), ("fetch", "other")]
    assert events[1].thread == "fetcher"


def test_a_thread_continues_the_lane_of_another():
    recorder = Recorder()
    lane = recorder.lane()
    lane.switch((COMPUTE, "a"))

    def backward():
        recorder.use(lane)
        recorder.lane().switch((COMPUTE, "b"))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    lane.switch(None)
    events = recorder.events(0, FAR)
    assert works(events) == [("compute", "a"), ("compute", "b")]
    assert events[0].thread == events[1].thread == threading.current_thread().name


def test_events_can_be_read_while_other_threads_record():
    recorder = Recorder(capacity=2000)
    stop = threading.Event()

    def record():
        while not stop.is_set():
            with recorder.span(UPDATE):
                pass

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter_ns()
    for _ in range(50):
        assert all(event.begin <= event.end for event in recorder.events(begin, FAR))
    stop.set()
    for thread in threads:
        thread.join()


def test_a_recorder_that_is_off_records_nothing():
    recorder = Recorder()
    recorder.is_on = False
    with recorder.span(FETCH):
        pass
    assert recorder.events(0, FAR) == []
