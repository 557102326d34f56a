"""Ctrl-C while functions run that it must not interrupt."""

import signal
import subprocess
import sys
import threading

import pytest

from headwater.core import interrupts
from headwater.core.interrupts import (
    UninterruptedContext,
    held_throughout,
    interruptible,
    uninterrupted,
    uninterrupted_items,
)


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_an_interrupt_is_raised_when_the_outermost_function_has_returned():
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


def test_an_interrupt_is_raised_after_an_error_of_the_function():
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


def test_a_waiting_interrupt_is_raised_where_the_code_of_the_user_begins():
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


def test_a_second_interrupt_is_raised_at_once_if_the_first_has_waited_for_long(monkeypatch, capfd):
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
    assert "press Ctrl-C again after 5 s" in capfd.readouterr().err


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


def test_functions_in_other_threads_do_not_delay_interrupts_of_the_main_thread():
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
            yield 1
            press()
            done.append("second")
            yield 2
        finally:
            done.append("closed")

    with pytest.raises(KeyboardInterrupt) as kept:
        for item in items():
            done.append(item)
    assert done == [1, "second", "closed"], kept


class Context:
    """Records when it is entered and left. It presses Ctrl-C in one of both."""

    def __init__(self, press_in):
        self.press_in, self.done = press_in, []

    def __enter__(self):
        self.note("enter")

    def __exit__(self, *_):
        self.note("exit")

    def note(self, place):
        if place == self.press_in:
            press()
        self.done.append(place)


@pytest.mark.parametrize(
    ("press_in", "done"), [("enter", ["enter", "exit"]), ("exit", ["enter", "inside", "exit"])]
)
def test_a_context_is_entered_and_left_whole(press_in, done):
    context = Context(press_in)
    with pytest.raises(KeyboardInterrupt), UninterruptedContext(context):
        context.done.append("inside")
    assert context.done == done


def test_a_waiting_interrupt_can_be_left_to_the_next_function():
    done = []

    def first():
        press()
        done.append("first")

    uninterrupted(first, raises=False)()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(done.append)("second")
    assert done == ["first", "second"]


def test_code_of_the_user_can_be_uninterrupted_too():
    done = []

    def user():
        press()
        done.append("user")

    with pytest.raises(KeyboardInterrupt):
        held_throughout(uninterrupted(lambda: interruptible(user)))
    assert done == ["user"]
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: interruptible(user))()
    assert done == ["user"], "only in that call"


def test_an_interrupt_that_is_to_wait_is_raised_if_the_function_fails():
    def fails():
        press()
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(fails, raises=False)()
    uninterrupted(list)()


def test_a_waiting_interrupt_is_forgotten_when_the_next_one_is_raised():
    uninterrupted(press, raises=False)()
    with pytest.raises(KeyboardInterrupt):
        press()
    uninterrupted(list)()


def test_a_handler_that_the_code_of_the_user_installs_stays():
    calls = []

    def user():
        usual = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *args: (calls.append(0), usual(*args)))

    uninterrupted(lambda: interruptible(user))()
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                press()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert len(calls) == 2


FORK_BY_THREAD = """
import os, signal, threading
from headwater.core.interrupts import uninterrupted

codes = []

def fork():
    child = os.fork()
    if not child:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

@uninterrupted
def outer():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()

outer()
print(codes)
"""


def test_a_fork_by_another_thread_is_interrupted_at_once():
    # In a new process: such a fork frees what torch keeps for the main thread. After a test with DTensors
    # this is a process group, which waits for a thread that the fork does not have.
    done = subprocess.run([sys.executable, "-c", FORK_BY_THREAD], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[7]\n", "")
