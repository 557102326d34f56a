"""The memory of a parameter: it follows the store, keeps values after a change, and returns."""

import gc

import torch

from headwater.stream.detached import Values
from headwater.stream.parameter_memory import (
    KeptHome,
    Memory,
    enter_store,
    leave_memory,
    leave_store,
    present_memory,
    return_to_memory,
)


class Home:
    """A home with two equal values."""

    def __init__(self, value):
        self.value = value

    def read(self):
        return torch.full((2,), float(self.value))

    def pieces(self):
        yield self.read()


def parameter(value=1):
    param = torch.nn.Parameter(torch.zeros(2))
    param.home = Home(value)
    return param


def test_memory_is_known_while_something_shares_it():
    param = parameter()
    assert present_memory(param) is None
    memory = Memory.of(param)
    assert Memory.of(param) is memory is present_memory(param)
    del memory
    gc.collect()
    assert present_memory(param) is None


def test_former_memory_keeps_the_values_and_may_return():
    param = parameter(1)
    memory = Memory.of(param)
    assert memory.home is param.home
    leave_memory(param)
    param.home.value = 2
    assert memory.home.read().tolist() == [1.0, 1.0]
    assert present_memory(param) is None
    return_to_memory(memory)
    assert present_memory(param) is memory and memory.home is param.home


def test_memory_of_a_plain_parameter_is_its_own_and_follows_it_into_a_store():
    param = parameter()
    memory = Memory.of(param)
    del param.home
    leave_store(param)
    assert isinstance(memory.home, KeptHome)
    memory.home.write(torch.ones(2))
    assert param.data.tolist() == [1.0, 1.0]
    enter_store(param)
    param.home = Home(3)
    assert memory.home is param.home


def test_memory_that_a_plain_parameter_has_left_does_not_follow_it():
    param = parameter()
    memory = Memory.of(param)
    leave_store(param)
    param.data = torch.full((2,), 5.0)
    enter_store(param)
    assert present_memory(param) is None
    assert memory.home.read().tolist() == [0.0, 0.0]


def test_values_are_read_from_the_present_place():
    param = parameter(4)
    values = Values(param)
    assert [piece.tolist() for piece in values()] == [[4.0, 4.0]]
    leave_memory(param)
    param.home.value = 9
    assert [piece.tolist() for piece in values()] == [[4.0, 4.0]]
    assert values != Values(param) and values == values


def test_two_readers_of_one_parameter_are_equal():
    param = parameter()
    first, second = Values(param), Values(param)
    assert first == second and hash(first) == hash(second)
    assert first != Values(parameter())
