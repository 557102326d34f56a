"""The check for changes of weights that torch does not count, without a model."""

import itertools

import pytest
import torch

from headwater.core.errors import StreamError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.streams import Event, ImmediateStream, Stream
from headwater.stream.device import CpuDevice
from headwater.stream.unseen_writes import UnseenWrites


def stage(index=0, sizes=(5, 3, 0), dtype=torch.float32):
    params = [ParamSpec(f"p{number}", (size,), dtype, dtype) for number, size in enumerate(sizes)]
    return StageSpec(index, f"stage{index}", tuple(params))


def image_of(spec):
    return torch.randint(256, (spec.slab_bytes,), dtype=torch.uint8)


class Always:
    """Random numbers with which each step checks the first stage that it can."""

    def random(self):
        return 1.0


def checking(device=None, *, always=True):
    unseen = UnseenWrites(device or CpuDevice())
    if always:
        unseen._random = Always()
    unseen.next_step(trains=True)
    return unseen


def changed_in_step(unseen, specs):
    """Run a step whose forward changes these stages; return the index of the stage that was found, if any."""
    for spec in specs:
        image = image_of(spec)
        unseen.begin(spec, image)
        image[0] ^= 1
        unseen.end(spec, ())
    try:
        unseen.next_step(trains=True)
    except StreamError as error:
        unseen.next_step(trains=True)
        return next(spec.index for spec in specs if spec.name in error.where)
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("byte", [0, -1])
def test_the_error_names_the_changed_parameter(dtype, byte):
    spec, known = stage(dtype=dtype), ()
    image, unseen = image_of(spec), checking()
    unseen.begin(spec, image)
    image[spec.offsets[1] : spec.offsets[1] + spec.params[1].wire_bytes][byte] ^= 1
    unseen.end(spec, known)
    with pytest.raises(StreamError, match=r"changes p1 by \.data or numpy"):
        unseen.raise_found()
    unseen.raise_found()  # once


def test_a_parameter_that_may_change_is_left_out():
    spec, unseen = stage(), checking()
    image = image_of(spec)
    unseen.begin(spec, image)
    image[0] ^= 1
    unseen.end(spec, {0})
    unseen.raise_found()


def test_negation_and_scaling_are_found():
    spec = stage(sizes=(64,))
    for change in (torch.neg_, lambda values: values.mul_(2), lambda values: values.add_(1)):
        unseen, image = checking(), torch.zeros(spec.slab_bytes, dtype=torch.uint8)
        # All positive: with as many negative values, the sum of the bytes might stay the same.
        image[:256].view(torch.float32).uniform_(1, 2)
        unseen.begin(spec, image)
        change(image[:256].view(torch.float32))
        unseen.end(spec, ())
        with pytest.raises(StreamError):
            unseen.raise_found()


def test_each_stage_is_checked_once_in_a_round():
    specs, unseen = [stage(index) for index in range(5)], checking()
    for _ in range(3):
        assert [changed_in_step(unseen, specs) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_stages_of_a_rare_forward_are_checked_too():
    unseen, encoder, decoder = checking(), [stage(0)], [stage(index) for index in range(1, 6)]
    found = {changed_in_step(unseen, decoder if step % 2 else encoder) for step in range(12)}
    assert found == {0, 1, 2, 3, 4, 5, None}


def test_every_stage_is_found_in_an_order_that_changes():
    specs, unseen = [stage(index) for index in range(5)], checking(always=False)
    found = [changed_in_step(unseen, specs) for _ in range(200)]
    for index in range(5):
        steps = [step for step, other in enumerate(found) if other == index]
        gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
        assert max([steps[0], *gaps]) <= 20 and len(set(gaps)) > 1


def test_a_forward_without_gradients_is_not_checked():
    spec, unseen = stage(), checking()
    image = image_of(spec)
    unseen.next_step(trains=False)
    unseen.begin(spec, image)
    image[0] ^= 1
    unseen.end(spec, ())
    unseen.next_step(trains=True)


class LateEvent(Event):
    is_reached = False

    def query(self):
        return self.is_reached

    def synchronize(self):
        assert self.is_reached, "the host must not wait for the device"


class LateStream(Stream):
    """A stream of a device: its event is reached when the test says so."""

    def __init__(self):
        self.event = LateEvent()

    def copy(self, target, source):
        target.copy_(source)

    def wait(self, event):
        pass

    def record(self):
        return self.event


class LateDevice:
    def __init__(self):
        self.compute = LateStream()

    def new_stream(self):
        return ImmediateStream()


def test_the_host_does_not_wait_for_the_result_of_a_check():
    spec, device = stage(), LateDevice()
    image, unseen = image_of(spec), checking(device)
    unseen.begin(spec, image)
    image[0] ^= 1
    unseen.end(spec, ())
    unseen.raise_found()
    unseen.next_step(trains=True)
    unseen.begin(spec, image)  # left out: the first result has not arrived
    unseen.end(spec, ())
    device.compute.event.is_reached = True
    with pytest.raises(StreamError, match="changes p0"):
        unseen.next_step(trains=True)
