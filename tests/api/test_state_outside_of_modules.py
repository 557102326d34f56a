"""Forwards that change state which is not in a module: it is as in plain PyTorch, whatever runs twice."""

import io
import os
import queue
from collections import deque
from contextvars import ContextVar
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from any_loop import adamw, check, randn
from torch import nn


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


def array():
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


MAKERS = [
    class_attribute, function_attribute, list_of_a_class, method_of_python, array, tensor,
    tensor_that_is_an_attribute, context_variable, environment, waiting_numbers, file_in_memory, namespace,
]  # fmt: skip


@pytest.mark.parametrize("plan", ["memory", "recompute"])
@pytest.mark.parametrize("make", MAKERS)
def test_what_forwards_change_outside_of_modules_is_as_in_plain_pytorch(plan, make, tmp_path):
    def script(place):
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

    check(script, plan, tmp_path)
