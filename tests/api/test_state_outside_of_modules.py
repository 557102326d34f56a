"""Forwards that change state which is not in a module: it is as in plain PyTorch, whatever runs twice."""

import array
import io
import itertools
import os
import queue
import sys
import weakref
from collections import deque
from contextvars import ContextVar
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from any_loop import adamw, check, randn
from torch import nn

from headwater.core.errors import StreamError


class Block(nn.Module):
    """A block that scales its output by a number that each call draws."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.draw = draw

    def forward(self, x):
        return torch.tanh(self.linear(x)) / self.draw()


def class_attribute():
    class Counter:
        calls = 0

        def draw(self):
            Counter.calls += 1
            return Counter.calls

    return Counter().draw


def function_attribute():
    def draw():
        draw.calls += 1
        return draw.calls

    draw.calls = 0
    return draw


def list_of_a_class():
    class Numbers:
        seen: ClassVar = []

        def draw(self):
            self.seen.append(1)
            return len(self.seen)

    return Numbers().draw


def method_of_python():
    return deque(range(1, 200)).popleft


def numpy_array():
    counts = np.zeros(3)

    def draw():
        counts[1] += 1
        return float(counts[1])

    return draw


def tensor():
    total = torch.zeros(())

    def draw():
        total.add_(1)
        return total.clone()

    return draw


def tensor_that_is_an_attribute():
    class Counter:
        total = torch.zeros(())

        def draw(self):
            self.total += 1
            return self.total.clone()

    return Counter().draw


def context_variable():
    total = ContextVar("total", default=0)

    def draw():
        total.set(total.get() + 1)
        return total.get()

    return draw


def environment():
    os.environ["HEADWATER_TEST_CALLS"] = "0"

    def draw():
        os.environ["HEADWATER_TEST_CALLS"] = str(int(os.environ["HEADWATER_TEST_CALLS"]) + 1)
        return int(os.environ["HEADWATER_TEST_CALLS"])

    return draw


def environment_in_a_closure():
    system = os
    system.environ["HEADWATER_TEST_CALLS"] = "0"

    def draw():
        system.environ["HEADWATER_TEST_CALLS"] = str(int(system.environ["HEADWATER_TEST_CALLS"]) + 1)
        return int(system.environ["HEADWATER_TEST_CALLS"])

    return draw


def waiting_numbers():
    numbers = queue.Queue()
    numbers.put(1)

    def draw():
        number = numbers.get()
        numbers.put(number + 1)
        return number

    return draw


def file_in_memory():
    written = io.BytesIO()

    def draw():
        written.write(b"x")
        return written.tell()

    return draw


def namespace():
    space = SimpleNamespace(calls=0)

    def draw():
        space.calls += 1
        return space.calls

    return draw


def iterator_over_a_tuple():
    return iter(tuple(range(1, 200))).__next__


def iterator_over_a_list():
    numbers = iter(list(range(1, 200)))
    return lambda: next(numbers)


def list_in_a_tuple():
    numbers = ([1],)

    def draw():
        numbers[0].append(1)
        return len(numbers[0])

    return draw


def dictionary_behind_a_proxy():
    numbers = MappingProxyType({"calls": [1]})

    def draw():
        numbers["calls"].append(1)
        return len(numbers["calls"])

    return draw


def bytes_of_python():
    counts = bytearray(2)

    def draw():
        counts[1] += 1
        return counts[1]

    return draw


def array_of_python():
    counts = array.array("d", [0.0])

    def draw():
        counts[0] += 1
        return counts[0]

    return draw


class Counter:
    alive: ClassVar = []

    def __init__(self):
        self.calls = 0
        self.alive.append(self)

    def draw(self):
        self.calls += 1
        return self.calls


def object_of_a_weak_reference():
    owner = weakref.ref(Counter())
    return lambda: owner().draw()


def object_of_a_weak_proxy():
    owner = weakref.proxy(Counter())
    return lambda: owner.draw()


def weak_dictionary():
    calls = weakref.WeakKeyDictionary({Counter(): 0})

    def draw():
        owner = next(iter(calls))
        calls[owner] += 1
        return calls[owner]

    return draw


def key_of_a_dictionary():
    owners = {Counter(): "name"}
    return lambda: next(iter(owners)).draw()


def class_of_a_class():
    class Kind(type):
        calls = 0

        def draw(cls):
            Kind.calls += 1
            return Kind.calls

    class Owner(metaclass=Kind):
        pass

    return lambda: Owner.draw()


def object_whose_metaclass_has_a_property_as_module():
    """As the classes of functions that Cython has compiled."""

    class Kind(type):
        @property
        def __module__(cls):
            return "compiled"

    class Owner(Counter, metaclass=Kind):
        pass

    return Owner().draw


def list_in_an_object_of_an_object():
    owner = Counter()
    owner.part = Counter()
    owner.part.seen = []

    def draw():
        owner.part.seen.append(1)
        return len(owner.part.seen)

    return draw


def module_in_a_closure():
    module = ModuleType("calls_in_a_closure")
    module.calls = 0

    def draw():
        module.calls += 1
        return module.calls

    return draw


def module_that_the_function_imports():
    sys.modules["calls_of_an_import"] = module = ModuleType("calls_of_an_import")
    module.calls = 0

    def draw():
        import calls_of_an_import

        calls_of_an_import.calls += 1
        return calls_of_an_import.calls

    return draw


def attribute_of_a_list():
    class Numbers(list):
        def draw(self):
            self.calls += 1
            return self.calls

    numbers = Numbers([1])
    numbers.calls = 0
    return numbers.draw


def class_attribute_of_a_dictionary():
    class Numbers(dict):
        calls = 0

        def __missing__(self, key):
            Numbers.calls += 1
            return Numbers.calls

    numbers = Numbers()
    return lambda: numbers["next"]


def view_of_bytes():
    counts = memoryview(bytearray(8)).cast("q")

    def draw():
        counts[0] += 1
        return counts[0]

    return draw


def engine_of_quasirandom_numbers():
    engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=1)
    return lambda: engine.draw(1) + 1


def reversed_iterator_over_a_list():
    numbers = reversed(list(range(1, 200)))
    return lambda: next(numbers)


def iterator_over_bytes():
    numbers = iter(bytes(range(1, 200)))
    return lambda: next(numbers)


MAKERS = [
    class_attribute, function_attribute, list_of_a_class, method_of_python, numpy_array, tensor,
    tensor_that_is_an_attribute, context_variable, environment, waiting_numbers, file_in_memory, namespace,
    iterator_over_a_tuple, iterator_over_a_list, list_in_a_tuple, dictionary_behind_a_proxy, bytes_of_python,
    array_of_python, object_of_a_weak_reference, object_of_a_weak_proxy, weak_dictionary, key_of_a_dictionary,
    environment_in_a_closure, class_of_a_class, object_whose_metaclass_has_a_property_as_module,
    list_in_an_object_of_an_object, module_in_a_closure,
    module_that_the_function_imports, attribute_of_a_list, class_attribute_of_a_dictionary, view_of_bytes,
    engine_of_quasirandom_numbers, reversed_iterator_over_a_list, iterator_over_bytes,
]  # fmt: skip


def train(place, make):
    """Take steps with blocks that draw their numbers from what `make` returns."""
    model = place.compile(nn.Sequential(*(Block(make()) for _ in range(3)), nn.Linear(6, 2)))
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(3):
        loss = model(randn(4, 6, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["memory", "recompute"])
@pytest.mark.parametrize("make", MAKERS)
def test_what_forwards_change_outside_of_modules_is_as_in_plain_pytorch(plan, make, tmp_path):
    check(lambda place: train(place, make), plan, tmp_path)


def generator():
    def numbers():
        number = 1.0
        while True:
            yield number
            number += 1

    return numbers().__next__


def iterator_over_a_range():
    return iter(range(1, 200)).__next__


def count():
    return itertools.count(1).__next__


def enumerated():
    numbers = enumerate("ab" * 100, start=1)
    return lambda: next(numbers)[0]


def iterator_over_a_dictionary():
    numbers = iter(dict.fromkeys(range(1, 200)))
    return lambda: next(numbers)


def iterator_over_items():
    numbers = iter({number: number for number in range(1, 200)}.items())
    return lambda: next(numbers)[0]


def iterator_over_a_set():
    numbers = iter(set(range(1, 200)))
    return lambda: next(numbers)


def iterator_over_a_loader():
    data = torch.utils.data.TensorDataset(torch.arange(1.0, 200.0))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=1))
    return lambda: next(batches)[0]


CANNOT_GO_BACK = [
    generator, iterator_over_a_range, count, enumerated, iterator_over_a_dictionary, iterator_over_items,
    iterator_over_a_set, iterator_over_a_loader,
]  # fmt: skip


@pytest.mark.parametrize("make", CANNOT_GO_BACK)
def test_iterators_that_cannot_go_back_are_refused(make, tmp_path):
    with pytest.raises(StreamError, match="the forward takes the next value of an iterator"):
        check(lambda place: train(place, make), "memory", tmp_path)


def large_tensor():
    total = torch.zeros(200, 200)

    def draw():
        total.add_(1)
        return total[0, 0].clone()

    return draw


def test_a_large_tensor_is_changed_once_for_each_forward(tmp_path):
    check(lambda place: train(place, large_tensor), "memory", tmp_path)


def test_a_large_tensor_that_a_forward_only_writes_is_as_in_plain_pytorch(tmp_path):
    """In the dry run fake tensors are added to it: they change no values, but the version counter."""
    seen = torch.zeros(200, 200)

    class Counting(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen[:6, :6] += y.detach().mT @ y.detach()
            return torch.tanh(y)

    def script(place):
        seen.zero_()
        model = place.compile(nn.Sequential(*[Counting(6, 6) for _ in range(2)]))
        for step in range(3):
            model(randn(4, 6, seed=step)).square().mean().backward()
        return model, seen

    check(script, "memory", tmp_path)


class DrawsFirst(Block):
    """A block whose second run in backward draws its number too: torch ends this run as soon as it can."""

    def forward(self, x):
        number = self.draw()
        return super().forward(x) * number


def large_tensor_that_a_later_forward_makes():
    """Only the second run in backward can change it twice: the dry run finds no tensor."""

    def draw():
        if draw.total is None:
            return 1.0
        draw.total.add_(1)
        return float(draw.total[0, 0])

    draw.total = None
    return draw


@pytest.mark.parametrize("plan", ["memory", "recompute"])
def test_a_change_of_a_large_tensor_that_is_new_is_made_once_or_refused(plan, tmp_path):
    def script(place):
        draw = large_tensor_that_a_later_forward_makes()
        model = place.compile(nn.Sequential(*(DrawsFirst(draw) for _ in range(2))))
        losses = []
        for step in range(3):
            loss = model(randn(4, 6, seed=step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                draw.total = torch.ones(200, 200)
        return losses, draw.total

    if plan == "memory":
        check(script, plan, tmp_path)
    else:
        with pytest.raises(StreamError, match=r"changes a tensor of shape \[200, 200\]"):
            check(script, plan, tmp_path)


class Registry:
    """Weights by name. A module writes its weights to it, and reads them from it."""

    def __init__(self):
        self.weights = {}


REGISTRY = Registry()


class Registered(nn.Linear):
    def __getattr__(self, name):
        value = super().__getattr__(name)
        return REGISTRY.weights.setdefault((id(self), name), value) if name == "weight" else value


@pytest.mark.parametrize("plan", ["memory", "recompute"])
def test_a_registry_that_attributes_of_modules_fill_is_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        REGISTRY.weights.clear()
        model = place.compile(nn.Sequential(*[Registered(6, 6) for _ in range(3)]))
        optimizer = adamw(model.parameters())
        for step in range(3):
            model(randn(4, 6, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, len(REGISTRY.weights)

    check(script, plan, tmp_path)
