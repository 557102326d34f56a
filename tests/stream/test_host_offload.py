"""Activations in host memory come back ahead of their use, beside the computation."""

import pytest
import torch

from headwater.core.streams import REACHED, Stream
from headwater.stream.host_arena import HostArena
from headwater.stream.offload import HostOffload

KIB = 1024
SIZE = 64 * KIB


class Recorded(Stream):
    """A stream that copies at once and records what it is told to do."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def copy(self, target, source):
        target.copy_(source)
        self.log.append((self.name, int(source[0])))

    def wait(self, event):
        self.log.append((self.name, "waits"))

    def record(self):
        return REACHED


class Recorder:
    """A device whose streams record."""

    torch_device = torch.device("cpu")

    def __init__(self):
        self.log, self.streams = [], 0
        self.compute = Recorded("compute", self.log)

    def new_stream(self):
        self.streams += 1
        return Recorded(("out", "back")[self.streams - 1], self.log)

    def copied_back(self):
        return [what for name, what in self.log if name == "back" and what != "waits"]


@pytest.fixture
def device():
    return Recorder()


@pytest.fixture
def offload(device):
    made = HostOffload(device, HostArena(lambda memory: lambda: None), window_bytes=2 * SIZE)
    yield made
    made.close()


def moved(offload, count):
    return [offload(torch.full((SIZE,), number, dtype=torch.uint8)) for number in range(count)]


def test_the_next_storages_come_back_before_the_computation_waits_for_the_first(device, offload):
    views = moved(offload, 6)
    assert int(views[5]()[0]) == 5
    assert device.copied_back() == [5, 4, 3], "two more fit the window"
    assert device.log[-1] == ("compute", "waits")
    for number in (4, 3, 2, 1, 0):
        assert int(views[number]()[0]) == number
    assert device.copied_back() == [5, 4, 3, 2, 1, 0]


def test_a_storage_larger_than_the_window_comes_back_alone(device, offload):
    views = [offload(torch.full((4 * SIZE,), number, dtype=torch.uint8)) for number in range(3)]
    views[2]()
    assert device.copied_back() == [2, 1]
    views[1]()
    assert device.copied_back() == [2, 1, 0]


def test_storages_that_backward_does_not_need_are_not_copied(device, offload):
    views = moved(offload, 4)
    del views[2]
    views[2]()
    assert device.copied_back() == [3, 1, 0]


def test_a_storage_that_was_used_before_its_turn_is_not_copied_again(device, offload):
    views = moved(offload, 5)
    kept = views[2]()
    views[4]()
    views[3]()
    assert device.copied_back() == [2, 4, 3, 1, 0]
    assert int(kept[0]) == 2


def test_a_storage_is_copied_again_if_it_is_needed_again(device, offload):
    views = moved(offload, 1)
    values = [int(views[0]()[0]) for _ in range(2)]
    assert values == [0, 0]
    assert device.copied_back() == [0, 0]
