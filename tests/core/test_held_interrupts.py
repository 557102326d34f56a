"""Ctrl-C while functions run that it must not interrupt."""

import signal
import threading

import pytest

from headwater.core import interrupts
from headwater.core.interrupts import UninterruptedContext, interruptible, uninterrupted, uninterrupted_items


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_it_is_raised_when_the_outermost_function_has_returned():
    done = []

    @uninterrupted
    def inner():
        press()
        done.append("inner")

    @uninterrupted
    def outer():
        inner()
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]
    outer_again = uninterrupted(lambda: "result")
    assert outer_again() == "result", "it is raised once"


def test_it_is_raised_after_an_error_of_the_function():
    @uninterrupted
    def fails():
        press()
        raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        fails()
    assert isinstance(raised.value.__context__, ValueError)


def test_code_of_the_user_is_interrupted_at_once():
    done = []

    def user():
        press()
        done.append("user")

    @uninterrupted
    def outer():
        try:
            interruptible(user)
        finally:
            press()  # waits again
            done.append("clean-up")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["clean-up"]


def test_one_that_waits_is_raised_where_the_code_of_the_user_begins():
    done = []

    @uninterrupted
    def outer():
        press()
        interruptible(done.append, "user")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert not done


def test_the_code_of_the_user_can_call_uninterrupted_functions_again():
    done = []

    @uninterrupted
    def inner():
        press()
        done.append("inner")

    def user():
        inner()
        done.append("user")

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(interruptible)(user)
    assert done == ["inner"]


def test_a_second_one_is_raised_at_once_if_the_first_has_waited_for_long(monkeypatch):
    done = []

    @uninterrupted
    def stuck():
        press()
        press()
        done.append("patient")
        monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)
        press()
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        stuck()
    assert done == ["patient"]


def test_a_handler_of_the_user_is_called_at_once():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("handler"))

    @uninterrupted
    def function():
        press()
        assert seen == ["handler"]

    try:
        function()
    finally:
        assert signal.signal(signal.SIGINT, signal.default_int_handler) is not signal.default_int_handler


def test_functions_in_other_threads_do_not_hold_back_one_of_the_main_thread():
    entered, end = threading.Event(), threading.Event()

    @uninterrupted
    def waits():
        entered.set()
        end.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    entered.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            press()
    finally:
        end.set()
        thread.join()


def test_a_generator_is_not_interrupted_but_its_caller_is():
    done = []

    @uninterrupted_items
    def items():
        try:
            press()
            done.append("first")
            yield 1
        finally:
            done.append("closed")

    pieces = items()
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    pieces.close()
    assert done == ["first", "closed"]


def test_a_context_is_entered_and_left_whole():
    done = []

    class Context:
        def __enter__(self):
            done.append("enter")

        def __exit__(self, *_):
            press()
            done.append("exit")

    with pytest.raises(KeyboardInterrupt), UninterruptedContext(Context()):
        done.append("inside")
    assert done == ["enter", "inside", "exit"]
