"""Python state that functions reach is as before after a run that does not count."""

import dataclasses
import io
import itertools
import os
import queue
import threading
from collections import deque
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from headwater.core.effects import effects_undone, state_of_model
from headwater.core.errors import StreamError
from headwater.core.python_state import PythonState
from headwater.core.user_functions import functions_of

calls = 0


def hooked(function):
    """Return a model with `function` as a hook."""
    model = nn.Linear(1, 1)
    model.register_forward_hook(function)
    return model


def test_cells_containers_attributes_and_globals_are_restored():
    count, seen, last = 0, [], deque([1], maxlen=3)

    class Owner:
        pass

    owner = Owner()
    owner.names = {"a": 1}

    def function():
        global calls
        nonlocal count
        calls += 1
        count += 1
        seen.append(count)
        last.append(count)
        owner.names["b"] = 2
        owner.new = True

    with effects_undone(hooked(function)):
        function()
        assert (calls, count, seen, owner.names) == (1, 1, [1], {"a": 1, "b": 2})
    assert (calls, count, seen, list(last), owner.names) == (0, 0, [], [1], {"a": 1})
    assert not hasattr(owner, "new")


def test_attributes_in_slots_are_restored():
    class Base:
        __slots__ = ("names", "total")

    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        count: int = 0

    class Owner(Base):
        __slots__ = ("__dict__", "__hidden", "new")

        def __init__(self):
            self.total, self.names, self.other, self.__hidden = 0, ["a"], 1, 2

        def change(self):
            self.total += 1
            self.names.append("b")
            self.other = self.__hidden = self.new = 5

        def state(self):
            return self.total, self.names, self.other, self.__hidden, hasattr(self, "new")

    owner, frozen = Owner(), Frozen()

    def function():
        owner.change()
        object.__setattr__(frozen, "count", frozen.count + 1)

    with effects_undone(hooked(function)):
        function()
        assert (owner.state(), frozen.count) == ((1, ["a", "b"], 5, 5, True), 1)
    assert (owner.state(), frozen.count) == ((0, ["a"], 1, 2, False), 0)


def test_attributes_of_classes_and_functions_are_restored():
    class Base:
        total = 0
        seen: ClassVar = []

    class Owner(Base):
        other = 1

    def helper():
        helper.calls += 1

    helper.calls = 0

    def function():
        Base.total += 1
        Base.seen.append(1)
        Owner.other, Owner.new = 2, 3
        helper()
        function.own = True

    owner = Owner()
    with effects_undone(hooked(lambda: (owner, helper, function))):
        function()
        assert (Owner.total, Owner.seen, Owner.other, Owner.new, helper.calls) == (1, [1], 2, 3, 1)
    assert (Owner.total, Owner.seen, Owner.other, helper.calls) == (0, [], 1, 0)
    assert not hasattr(Owner, "new") and not hasattr(function, "own")


def test_the_class_of_a_module_is_restored():
    class Own(nn.Module):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x

    model = Own()
    with effects_undone(model):
        model(1)
        assert Own.calls == 1
    assert Own.calls == 0


def encoder(x):
    return x


def test_functions_and_classes_that_a_forward_registers_stay_registered():
    class Registry:
        known: ClassVar = {"first": 1}

        def __setitem__(self, name, value):
            self.known[name] = value

    registry, value = Registry(), torch.ones(1)

    def function():
        registry["first"] = 2
        registry["encoder"], registry["class"] = encoder, Registry
        registry["closure"], registry["tensor"] = lambda: value, value

    with effects_undone(hooked(function)):
        function()
    assert Registry.known == {"first": 1, "encoder": encoder, "class": Registry}


def test_owners_of_methods_of_python_are_reached():
    waiting = deque([1, 2])
    take = waiting.popleft
    with effects_undone(hooked(lambda: take)):
        take()
    assert list(waiting) == [1, 2]


def test_small_arrays_are_restored():
    counts, parts = np.zeros(3), np.array([np.nan, 1.0])[1:]
    with effects_undone(hooked(lambda: (counts, parts))):
        counts[1] += 1
        parts[0] = 5
    assert counts.sum() == 0 and parts[0] == 1


def test_state_is_restored_after_an_error_too():
    seen = []
    with pytest.raises(ValueError, match="stop"), effects_undone(hooked(lambda: seen)):
        seen.append(1)
        raise ValueError("stop")
    assert seen == []


def test_arguments_of_partials_and_owners_of_methods_are_reached():
    class Counter:
        def __init__(self):
            self.total = 0

        def add(self, into):
            self.total += 1
            into.append(self.total)

    counter, into = Counter(), []
    function = partial(counter.add, into)
    with effects_undone(hooked(function)):
        function()
    assert counter.total == 0 and into == []


class WithoutLength(tuple):
    """A tuple whose methods raise, like the irreps of e3nn."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


def test_items_of_tuples_that_override_methods_are_reached():
    seen = []
    items = WithoutLength([seen])

    def hook(*args):
        tuple.__getitem__(items, 0).append(1)

    with effects_undone(hooked(hook)):
        hook()
    assert seen == []


def test_tensors_are_restored_and_their_versions_do_not_change():
    small, large = torch.zeros(1), torch.zeros(1 << 15)
    with effects_undone(hooked(lambda: (small, large))):
        small += 1
        large += 1
        versions = small._version, large._version
    assert (small.item(), large[0].item(), small._version, large._version) == (0, 0, *versions)


def test_iterators_go_back_or_are_refused():
    names, numbers = iter(["a", "b", "c"]), itertools.count()
    next(names)
    with effects_undone(hooked(lambda: (names, numbers))):
        assert list(itertools.islice(names, 1)) == ["b"]
    assert list(names) == ["b", "c"]
    with effects_undone(hooked(lambda: (names, numbers))):  # it is at its end
        pass
    with (
        pytest.raises(StreamError, match="a count cannot go back"),
        effects_undone(hooked(lambda: (names, numbers))),
    ):
        next(numbers)


def test_objects_of_python_that_hold_state_are_restored():
    space, waiting, local = SimpleNamespace(total=1), queue.Queue(), threading.local()
    variable, unset = ContextVar("variable", default=1), ContextVar("unset")
    data, text = io.BytesIO(b"abc"), io.StringIO()
    closed = io.BytesIO()
    closed.close()
    local.total = 1
    os.environ["HEADWATER_TEST_BEFORE"] = "1"

    def function():
        space.total, local.total = 2, 2
        waiting.put(1)
        variable.set(2)
        unset.set(2)
        data.seek(0, io.SEEK_END)
        data.write(b"d")
        text.write("e")
        os.environ["HEADWATER_TEST_BEFORE"], os.environ["HEADWATER_TEST_NEW"] = "2", "2"
        return closed

    with effects_undone(hooked(function)):
        function()
    assert (space.total, local.total, waiting.qsize(), variable.get()) == (1, 1, 0, 1)
    assert unset.get() == 2  # it cannot be without a value again
    assert (data.getvalue(), data.tell(), text.getvalue()) == (b"abc", 0, "")
    assert os.environ.pop("HEADWATER_TEST_BEFORE") == "1" and "HEADWATER_TEST_NEW" not in os.environ


def test_a_file_in_memory_that_a_forward_closes_is_changed():
    file = io.StringIO()
    state = state_of_model(hooked(lambda: file))
    file.close()
    assert not state.is_present()
    state.put_back()
    later = PythonState()
    later.add_places_of(state)
    assert later.is_present()


def test_hooks_and_forwards_of_the_user_are_functions_of_a_model():
    class Own(nn.Module):
        def forward(self, x):
            return x

    def hook(module, args, output):
        return None

    model = nn.Sequential(Own(), nn.Linear(1, 1))
    model[1].register_forward_hook(hook)
    assert set(functions_of(model)) == {Own.forward, hook}
