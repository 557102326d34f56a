"""The choice between compiled and eager blocks, from planted times."""

import dataclasses

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.plan.compilation import BlockTimes, Kind, choose, repeated_stages, too_short

TIMES = BlockTimes(
    eager_forward_s=1.0,
    eager_backward_s=2.0,
    compiled_forward_s=0.9,
    compiled_backward_s=1.8,
    noise=0.01,
    compile_s=20.0,
    compiler_bytes=100,
)
"""A block that takes 3 s, and 2.7 s compiled."""


def chosen(times=TIMES, *, micro_batches=1000, spare_bytes=None, **kind):
    return choose([Kind(times, **{"count": 4, **kind})], micro_batches, spare_bytes)


def test_blocks_are_compiled_if_the_run_saves_twice_the_time_of_the_compilation():
    # 4 blocks save 1.2 s of a micro-batch, and compilation takes 20 s.
    assert not chosen(micro_batches=33).compiled
    choice = chosen(micro_batches=34)
    assert choice.compiled
    assert "90.0% of the time of eager blocks" in choice.reason
    assert "compilation takes 20.0 s, and the run saves 40.8 s" in choice.reason


@pytest.mark.parametrize(
    ("compiled_s", "noise", "compiled"), [(0.99, 0, False), (0.97, 0, True), (0.97, 0.04, False)]
)
def test_a_gain_below_two_percent_or_below_the_noise_does_not_count(compiled_s, noise, compiled):
    times = dataclasses.replace(
        TIMES, compiled_forward_s=compiled_s, compiled_backward_s=2 * compiled_s, noise=noise
    )
    choice = chosen(times, micro_batches=10**9)
    assert choice.compiled == compiled
    assert compiled or f"differences below {max(0.02, noise):.0%} do not count" in choice.reason


def test_each_variant_of_a_block_is_compiled():
    assert chosen(micro_batches=60, variants=1).compiled
    assert not chosen(micro_batches=60, variants=2).compiled


def test_the_forward_of_a_recomputed_block_counts_twice():
    slow_forward = dataclasses.replace(TIMES, compiled_forward_s=1.3)
    assert chosen(dataclasses.replace(slow_forward, compiled_backward_s=1.5)).compiled  # 2.8 of 3.0
    assert not chosen(dataclasses.replace(slow_forward, compiled_backward_s=1.5), recomputed=4).compiled


def test_all_kinds_of_blocks_are_compiled_or_none():
    slower = dataclasses.replace(TIMES, compiled_backward_s=2.2)  # 3.1 s
    assert choose([Kind(TIMES, 4), Kind(slower, 2)], 1000, None).compiled
    assert not choose([Kind(TIMES, 4), Kind(slower, 12)], 1000, None).compiled


def test_the_compiler_needs_memory_that_the_plan_leaves_free():
    assert chosen(spare_bytes=100).compiled
    choice = chosen(spare_bytes=99)
    assert not choice.compiled
    assert choice.reason == "the compiler takes 100 B of host memory, and 99 B are left"


def test_a_run_that_no_gain_can_pay_for_is_not_measured():
    assert too_short(step_s=1.0, steps=300) is None
    assert "the run takes about 4.98 min" in too_short(step_s=1.0, steps=299)


def stage(index, name, width, dtype=torch.bfloat16):
    param = ParamSpec(f"{name}.weight", (width, width), torch.float32, dtype)
    return StageSpec(index, name, (param,))


def test_stages_of_one_class_and_equal_shapes_are_repeated():
    names = [("a", 4), ("b", 8), ("c", 4), ("d", 16), ("", 8), ("e", 8), ("head", 4)]
    stages = [stage(index, name, width) for index, (name, width) in enumerate(names)]
    kinds = {"head": "Head"}.get
    assert repeated_stages(stages, kinds) == [[0, 2], [1, 5]]  # the model itself has no name
    assert repeated_stages([stage(0, "a", 4), stage(1, "b", 4, torch.float32)], kinds) == []
