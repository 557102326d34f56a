"""The native kernel of Adam has the bits of torch's: in random updates, and in whole trainings."""

import contextlib
import logging
import math
import random
import subprocess
import sys
from unittest import mock

import pytest
import torch

from headwater.core import native
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store import native_check
from headwater.store.masters import read_master, write_master
from headwater.store.native_adam import AdamKernel
from headwater.store.native_check import agrees, checked_adam
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.update import Part, Pending, Progress, Update
from headwater.store.updater import Updater

PIECE = 3000
BF16, FP32 = torch.bfloat16, torch.float32


class Counting:
    """The kernel, with a count of the elements that it has updated."""

    def __init__(self):
        self.kernel, self.elements = checked_adam(), 0
        assert self.kernel is not None, "a C compiler, and a torch with fused multiply-add, are needed"

    def run(self, pieces, settings):
        self.elements += sum(piece.numel for piece in pieces)
        self.kernel.run(pieces, settings)


class Stage:
    """A stage in memory with random masters, which one kernel updates."""

    def __init__(self, specs, optimizer, kernel, seed, options=None):
        self.rule = UpdateRule(optimizer, options)
        self.layout = stage_layout(StageSpec(0, "s", specs), self.rule, piece_elements=PIECE)
        self.image = torch.zeros(self.layout.wire_bytes, dtype=torch.uint8)
        self.rest = torch.zeros(self.layout.rest_bytes, dtype=torch.uint8)
        self.updater = Updater(self.rule, lambda: kernel)
        self.scalars = [None] * len(specs)
        generator = torch.Generator().manual_seed(seed)
        for piece in self.pieces():
            wire = self.layout.stage.flat_views(self.image)[piece.param][piece.start : piece.stop]
            master = wild(generator, (piece.stop - piece.start,)).to(specs[piece.param].dtype)
            write_master(piece.encoding, master, wire, self.fields(piece))

    def pieces(self):
        return [piece for group in self.layout.groups for piece in group.pieces]

    def fields(self, piece):
        group = next(group for group in self.layout.groups if piece in group.pieces)
        return piece.views(self.bytes_of(group))

    def bytes_of(self, group):
        return self.rest[group.offset : group.offset + group.num_bytes]

    def step(self, gradients, update, factor, *, undoable=False):
        groups = [(group, self.bytes_of(group)) for group in self.layout.groups]
        part, progress = Part(1, update, factor), Progress.of(self.scalars, undoable=undoable)
        pending = Pending(1, dict.fromkeys(range(len(self.scalars)), part))
        self.updater.apply(self.layout, self.image, groups, list(gradients), self.scalars, pending, progress)
        self.scalars = progress.after

    def masters(self, param):
        wire = self.layout.stage.flat_views(self.image)[param]
        pieces = [piece for piece in self.pieces() if piece.param == param]
        spaces = [torch.empty(piece.stop - piece.start) for piece in pieces]
        return torch.cat([
            read_master(piece.encoding, wire[piece.start : piece.stop], self.fields(piece), space)
            for piece, space in zip(pieces, spaces, strict=True)
        ])  # fmt: skip

    def tensors(self):
        """Return all tensors of the stage, by name."""
        wires = self.layout.stage.flat_views(self.image)
        found = {f"{index} wire": wire for index, wire in enumerate(wires)}
        for piece in self.pieces():
            found |= {f"{piece.param} {piece.start} {k}": v.view(-1) for k, v in self.fields(piece).items()}
        return found


def wild(generator, shape):
    """Return numbers of all sizes: ordinary, zeros of both signs, tiny ones, denormal ones, and huge ones.

    Others are ties: halfway between two bf16 numbers.
    """
    values = torch.randn(shape, generator=generator)
    kind = torch.randint(0, 8, shape, generator=generator)
    exponents = torch.randint(-149, 100, shape, generator=generator).float()
    values[kind == 0] *= 0.0
    values[kind == 1] *= torch.exp2(exponents[kind == 1])
    values[kind == 2] *= 1e-3
    bits = values.view(torch.int32)
    bits[kind == 3] = bits[kind == 3] >> 16 << 16 | 1 << 15
    return values


def assert_same_bits(one, other):
    """Compare all tensors bit by bit. A NaN is equal to a NaN."""
    for (name, own), its in zip(one.tensors().items(), other.tensors().values(), strict=True):
        if own.dtype.is_floating_point:
            assert torch.equal(own.isnan(), its.isnan()), name
            own, its = own.nan_to_num(), its.nan_to_num()
            own, its = (own.view(torch.int32), its.view(torch.int32)) if own.dtype == FP32 else (own, its)
            its, own = (its.view(torch.int16), own.view(torch.int16)) if own.dtype == BF16 else (its, own)
        assert torch.equal(own, its), name
    for own, its in zip(one.scalars, other.scalars, strict=True):
        assert own.keys() == its.keys()
        assert all(torch.equal(own[key], its[key]) and own[key].dtype == its[key].dtype for key in own)


def random_params(draw):
    sizes = [draw.choice((draw.randrange(1, 80), draw.randrange(1, 3 * PIECE))) for _ in range(8)]
    wires = [draw.choice((FP32, BF16, BF16)) for _ in sizes]
    return tuple(
        ParamSpec(
            f"p{index}", (size,), FP32, wire, bf16_state=draw.random() < 0.3, exact_cast=draw.random() < 0.4
        )
        for index, (size, wire) in enumerate(zip(sizes, wires, strict=True))
    )


def random_optimizer(draw):
    return OptimizerSpec(
        draw.choice(("Adam", "AdamW")),
        {
            "lr": 10 ** draw.uniform(-6, 0),
            "betas": (draw.choice((0.0, 0.3, 0.5, 0.9, 0.95)), draw.choice((0.5, 0.9, 0.95, 0.999))),
            "eps": 10 ** draw.uniform(-12, -2),
            "weight_decay": draw.choice((0, 0.0, 1e-3, 0.1, draw.random())),
            "maximize": draw.random() < 0.3,
            "decoupled_weight_decay": draw.random() < 0.2,
        },
    )


def without(spec, *names):
    return OptimizerSpec(spec.name, {k: v for k, v in spec.kwargs.items() if k not in names})


def random_steps(draw, params):
    """Yield gradients, settings and the factor of some updates."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    limits = (None, None, 10 ** draw.uniform(-6, 3))
    for step in range(1, draw.choice((2, 4))):
        gradients = [wild(generator, spec.shape).to(draw.choice((FP32, BF16))) for spec in params]
        factor = None if draw.random() < 0.3 else torch.rand((), generator=generator)
        options = {"lr": 10 ** draw.uniform(-5, -1), "weight_decay": draw.choice((0.0, 0.05))}
        yield gradients, Update(step, options, max_value=draw.choice(limits)), factor


@pytest.fixture
def threads(request):
    """Set the number of torch's threads during a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Mostly one thread: on a busy machine threads wait long for each other.
@pytest.mark.parametrize(
    ("seed", "threads"), [(seed, 1 + (seed % 8 == 0)) for seed in range(150)], indirect=["threads"]
)
def test_random_updates_have_the_bits_of_torch(seed, threads):
    draw = random.Random(seed)
    params, optimizer, kernel = random_params(draw), random_optimizer(draw), Counting()
    if optimizer.name == "AdamW":
        optimizer = without(optimizer, "decoupled_weight_decay")
    steps = list(random_steps(draw, params))
    own, plain = (Stage(params, optimizer, each, seed) for each in (kernel, None))
    for number, step in enumerate(steps, start=1):
        own.step(*step)
        plain.step(*step)
        assert_same_bits(own, plain)
        assert kernel.elements == number * sum(spec.numel for spec in params)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
def test_each_number_of_threads_has_the_bits_of_torch(threads):
    params = tuple(ParamSpec(f"p{i}", (100_003,), FP32, BF16, exact_cast=i == 1) for i in range(2))
    gradients = [wild(torch.Generator().manual_seed(i), (100_003,)) for i in range(2)]
    own, plain = (Stage(params, ADAMW, kernel, 0) for kernel in (Counting(), None))
    for stage in (own, plain):
        stage.step(gradients, Update(1, {"lr": 0.1}), None)
    assert_same_bits(own, plain)


@pytest.mark.parametrize("step_size", [0.0, 2.0**-9, 1e-3])
def test_ties_are_rounded_to_even_in_every_update(step_size):
    """A rate of zero keeps all ties; the second rate moves many masters from one tie to another."""
    params = (ParamSpec("a", (3 * PIECE + 5,), FP32, BF16, exact_cast=True),)
    kernel = Counting()
    own, plain = (Stage(params, OptimizerSpec("Adam", {"eps": 0.0}), each, 0) for each in (kernel, None))
    for number in range(1, 4):
        for stage in (own, plain):
            stage.step([torch.ones(params[0].shape)], Update(number, {"lr": step_size}), None)
        assert_same_bits(own, plain)
        wire = own.tensors()["0 wire"]
        assert torch.equal(wire.view(torch.int16), own.masters(0).to(BF16).view(torch.int16))
    assert kernel.elements == 3 * params[0].numel


def test_numbers_that_are_not_finite_stay_where_torch_has_them():
    kinds = ({"wire_dtype": BF16}, {"wire_dtype": FP32}, {"wire_dtype": BF16, "exact_cast": True})
    params = tuple(ParamSpec(str(index), (100,), FP32, **kind) for index, kind in enumerate(kinds))
    gradient = torch.linspace(-3, 3, 100)
    gradient[::7], gradient[3::7], gradient[5::7] = math.inf, -math.inf, math.nan
    own, plain = (Stage(params, ADAMW, kernel, 0) for kernel in (Counting(), None))
    for number in (1, 2):
        for stage in (own, plain):
            stage.step([gradient] * 3, Update(number, {"lr": 0.1}, max_value=2.0), torch.tensor(0.5))
        assert_same_bits(own, plain)


@pytest.mark.parametrize("count", [2**24 - 2, 2**24, 2**25])
def test_counts_of_steps_that_fp32_cannot_hold(count):
    """torch counts in fp32, where 2^24 + 1 is 2^24."""
    params, kernel = (ParamSpec("a", (100,), FP32, BF16),), Counting()
    own, plain = (Stage(params, ADAMW, each, 0) for each in (kernel, None))
    gradients = [torch.randn(100, generator=torch.Generator().manual_seed(0))]
    for number in range(1, 5):
        for stage in (own, plain):
            stage.step(gradients, Update(number, {"lr": 0.1}), None)
            if number == 1:
                stage.scalars = [{"step": torch.tensor(float(count))}]
        assert_same_bits(own, plain)
    assert kernel.elements == 4 * 100 and own.scalars[0]["step"] == min(count + 3, max(count, 2**24))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1, "eps": 0, "betas": (0.0, 0.0)},
        {"lr": 0.0, "weight_decay": 7.5},
        {"lr": 2.0, "weight_decay": 1, "betas": (0.999999, 0.0)},
        {"fused": True, "foreach": False, "betas": (1e-9, 0.999999999)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_options_at_the_ends_of_their_ranges(name, options):
    params, kernel = (ParamSpec("a", (103,), FP32, BF16),), Counting()
    own, plain = (Stage(params, OptimizerSpec(name, options), each, 0) for each in (kernel, None))
    for number in range(1, 4):
        gradients = [wild(torch.Generator().manual_seed(number), (103,))]
        for stage in (own, plain):
            stage.step(gradients, Update(number, {}), None)
        assert_same_bits(own, plain)
    assert kernel.elements == 3 * 103


def test_a_parameter_without_elements():
    params = (ParamSpec("a", (0,), FP32, BF16), ParamSpec("b", (9,), FP32, BF16))
    own, plain = (Stage(params, ADAMW, each, 0) for each in (Counting(), None))
    for stage in (own, plain):
        stage.step([torch.ones(0), torch.ones(9)], Update(1, {}), None)
    assert_same_bits(own, plain)


def test_a_gradient_and_a_parameter_in_another_order_of_memory():
    params = (ParamSpec("a", (60, 50), FP32, BF16, strides=(1, 60)), ParamSpec("b", (60, 50), FP32, FP32))
    straight = torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    kernel = Counting()
    own, plain = (Stage(params, ADAMW, each, 0) for each in (kernel, None))
    for gradients in ([straight, straight.T.contiguous().T], [straight.T.contiguous().T, straight]):
        for stage in (own, plain):
            stage.step(gradients, Update(1, {"lr": 0.1}), None)
        assert_same_bits(own, plain)
    assert kernel.elements == 2 * 2 * 3000


def test_a_stage_continues_with_the_other_kernel():
    """So a checkpoint that one kernel has written can be resumed with the other."""
    params = (ParamSpec("a", (5000,), FP32, BF16, bf16_state=True), ParamSpec("b", (77,), FP32, BF16))
    gradients = [torch.randn(spec.shape, generator=torch.Generator().manual_seed(0)) for spec in params]
    mixed, plain = (Stage(params, ADAMW, None, 0) for _ in range(2))
    for number, kernel in enumerate((Counting(), None, Counting()), start=1):
        mixed.updater = Updater(mixed.rule, lambda kernel=kernel: kernel)
        for stage in (mixed, plain):
            stage.step(gradients, Update(number, {"lr": 0.1}), None)
    assert_same_bits(mixed, plain)


# cases that torch's optimizer updates

ADAMW = OptimizerSpec("AdamW", {"lr": 1e-2, "weight_decay": 0.1})


def ordinary(**changes):
    return ParamSpec("p", (30, 4), **{"dtype": FP32, "wire_dtype": BF16, **changes})


OTHERS = {
    "amsgrad": (OptimizerSpec("Adam", {"amsgrad": True}), ordinary()),
    "torch's loop": (OptimizerSpec("Adam", {"foreach": False, "fused": False}), ordinary()),
    "a rate that is a tensor": (OptimizerSpec("AdamW", {"lr": torch.tensor(0.1)}), ordinary()),
    "another optimizer": (OptimizerSpec("SGD", {"lr": 0.1}), ordinary()),
    "an optimizer of whole parameters": (OptimizerSpec("Lamb", {"lr": 0.1}), ordinary()),
    "fp16": (ADAMW, ordinary(wire_dtype=torch.float16)),
    "fp64": (ADAMW, ordinary(dtype=torch.float64, wire_dtype=torch.float64)),
    "bf16 masters": (ADAMW, ordinary(dtype=BF16)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_torch_updates_other_cases(case):
    optimizer, spec = OTHERS[case]
    kernel = Counting()
    gradient = torch.ones(spec.shape, dtype=spec.wire_dtype)
    stage = Stage((spec,), optimizer, kernel, 0)
    before = stage.image.clone()
    stage.step([gradient], Update(1, {}), None)
    assert kernel.elements == 0 and not torch.equal(stage.image, before)


def test_torch_updates_stages_in_device_memory():
    """An update there must be undone if memory is missing, and runs on the device."""
    kernel = Counting()
    stage = Stage((ordinary(),), ADAMW, kernel, 0)
    stage.step([torch.ones(30, 4)], Update(1, {}), None, undoable=True)
    assert kernel.elements == 0


def test_one_group_has_parameters_for_both_kernels():
    params = (ordinary(), ParamSpec("q", (40,), FP32, torch.float16), ParamSpec("r", (50,), FP32, FP32))
    gradients = [torch.ones(spec.shape, dtype=spec.wire_dtype) for spec in params]
    kernel = Counting()
    own, plain = (Stage(params, ADAMW, each, 0) for each in (kernel, None))
    for stage in (own, plain):
        stage.step(gradients, Update(1, {}), None)
    assert kernel.elements == 120 + 50
    assert_same_bits(own, plain)


# the check of the kernel


def test_the_check_finds_a_kernel_that_divides_pieces_at_another_width():
    kernel = checked_adam()
    width = kernel._width.value
    assert agrees(kernel)
    others = [AdamKernel(native_check._library(), other) for other in (2 * width, 1)]
    assert not any(map(agrees, others))


@pytest.fixture
def first_use():
    """Forget what this process knows of the kernel, before and after a test."""
    caches = native._loaded_once, native_check._checked_once
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def unknown(first_use, monkeypatch, tmp_path):
    """Make the stored results of other processes invalid: the code of updates has another hash."""
    monkeypatch.setattr(native_check, "_digest_of_updates", lambda: str(tmp_path))


def forget():
    native._loaded_once.cache_clear()
    native_check._checked_once.cache_clear()


def test_a_kernel_with_other_bits_is_not_used_and_one_line_says_so(unknown, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "headwater")
    monkeypatch.setattr(native_check, "_WIDTHS", (3,))
    for _ in range(2):
        assert checked_adam() is None and checked_adam() is None
        (line,) = [
            record.getMessage() for record in caplog.records if record.name.startswith("headwater.store")
        ]
        assert "torch's kernel is used" in line
        forget()  # the next process compares again, because only agreement is stored
        caplog.clear()


def test_the_next_process_does_not_compare_again(unknown, monkeypatch):
    compared = []
    monkeypatch.setattr(native_check, "agrees", lambda kernel: compared.append(1) or agrees(kernel))
    width = checked_adam()._width.value
    assert compared
    compared.clear()
    forget()
    assert checked_adam()._width.value == width and not compared
    forget()
    monkeypatch.setattr(native_check, "_digest_of_updates", lambda: "other code")
    assert checked_adam()._width.value == width and compared


@contextlib.contextmanager
def other_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def without_denormals():
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def with_attribute(owner, name, value):
    return lambda: mock.patch.object(owner, name, value)


@pytest.mark.parametrize(
    "changed",
    [
        other_threads,
        without_denormals,
        with_attribute(torch, "__version__", "1.0"),
        with_attribute(torch, "__file__", __file__),
        with_attribute(torch.backends.cpu, "get_cpu_capability", lambda: "other"),
        with_attribute(native_check, "__file__", native.__file__),
    ],
    ids=["threads", "denormals", "version", "build", "capability", "code"],
)
def test_a_stored_result_is_not_used_under_other_conditions(changed):
    before = native_check._conditions()
    with changed():
        assert native_check._conditions() != before
    assert native_check._conditions() == before


def test_the_switch_turns_the_kernel_off(first_use, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert checked_adam() is None


@pytest.mark.real_start
def test_a_torch_without_fused_multiply_add_keeps_its_own_kernel():
    """torch chooses its kernels when it is imported. Those for any processor round twice."""
    code = (
        "import torch; from headwater.store.native_check import checked_adam; "
        "print(torch.backends.cpu.get_cpu_capability(), checked_adam() is None)"
    )
    command = ["env", "ATEN_CPU_CAPABILITY=default", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "DEFAULT True\n"
