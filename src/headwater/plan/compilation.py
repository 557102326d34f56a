"""The choice between compiled and eager blocks, from times that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from headwater.core.stage import StageSpec
from headwater.core.units import format_bytes, format_duration
from headwater.plan.types import Blocks

LEAST_GAIN = 0.02
"""Blocks stay eager if compilation, which changes the bits of results, saves less of their time than this."""
MOST_GAIN = 0.2
"""Compilation rarely saves more than this fraction of a step. If even this gain would not pay for the
compilation, the blocks are not measured."""
COMPILE_S = 30.0
"""Seconds that the compilation of one kind of block usually takes."""
PAYS_TIMES = 2.0
"""The saved time must be at least this multiple of the time that compilation takes."""
MOST_VARIANTS = 8
"""Maximum number of variants of a function that torch compiles. It warns, and runs further variants eagerly.

Which variants run eagerly depends on the order of the calls, and so on the step at which a run was resumed.
"""


@dataclasses.dataclass(frozen=True)
class BlockTimes:
    """Times of one block for a micro-batch, the best of several runs, eager and compiled in turn.

    Attributes:
        eager_forward_s: forward; on a CPU the CPU seconds of a thread.
        eager_backward_s: backward.
        compiled_forward_s: compiled forward.
        compiled_backward_s: compiled backward.
        noise: relative difference of two measurements of the same eager block.
        compile_s: wall time of the first compiled call and its backward.
        compiler_bytes: host memory that the compiler and its code took.
    """

    eager_forward_s: float
    eager_backward_s: float
    compiled_forward_s: float
    compiled_backward_s: float
    noise: float
    compile_s: float
    compiler_bytes: int


@dataclasses.dataclass(frozen=True)
class Kind:
    """Blocks of a run that share one measurement.

    Attributes:
        times: the measurement.
        count: number of blocks.
        recomputed: number of these blocks whose forward runs again in backward.
        variants: number of variants that the compiler makes, because the blocks differ in constants.
    """

    times: BlockTimes
    count: int
    recomputed: int = 0
    variants: int = 1

    @property
    def eager_s(self) -> float:
        """Seconds of all these blocks for a micro-batch in eager mode."""
        times = self.times
        runs = self.count + self.recomputed
        return runs * times.eager_forward_s + self.count * times.eager_backward_s

    @property
    def compiled_s(self) -> float:
        """Seconds of all these blocks for a micro-batch if they are compiled."""
        times = self.times
        runs = self.count + self.recomputed
        return runs * times.compiled_forward_s + self.count * times.compiled_backward_s


def repeated_stages(stages: Sequence[StageSpec], kind_of: Callable[[str], object]) -> list[list[int]]:
    """Return the stages that are compiled: lists of at least two stages of one class with equal shapes.

    Args:
        stages: the stages.
        kind_of: returns the class of the module with a name. An embedding and a head can have equal shapes.
    """
    groups: dict[object, list[int]] = {}
    for stage in stages:
        shape = tuple((param.shape, param.wire_dtype) for param in stage.params)
        # A model that is one stage has no name, and no second stage like it.
        if stage.name:
            groups.setdefault((kind_of(stage.name), shape), []).append(stage.index)
    return [group for group in groups.values() if len(group) > 1]


def too_short(step_s: float, steps: int) -> str | None:
    """Return why a run is too short to measure compiled blocks; `None` if it is long enough.

    Args:
        step_s: predicted seconds of a step.
        steps: steps of the run.
    """
    if MOST_GAIN * step_s * steps >= PAYS_TIMES * COMPILE_S:
        return None
    return (
        f"the run takes about {format_duration(step_s * steps)}; compilation takes {COMPILE_S:g} s and "
        f"saves at most {MOST_GAIN:.0%}"
    )


def choose(kinds: Sequence[Kind], micro_batches: int, spare_bytes: int | None) -> Blocks:
    """Return whether to compile the blocks of a run, by their measured times.

    Args:
        kinds: the measured blocks.
        micro_batches: micro-batches of the whole run on one rank.
        spare_bytes: host memory that the plan leaves free; `None`: no limit.

    Returns:
        The choice, with its reason.
    """
    eager_s, compiled_s = sum(kind.eager_s for kind in kinds), sum(kind.compiled_s for kind in kinds)
    gain, noise = 1 - compiled_s / eager_s, max(kind.times.noise for kind in kinds)
    # A gain that is smaller than the noise of the measurement may be a loss.
    least = max(LEAST_GAIN, noise)
    measured = f"compiled blocks take {compiled_s / eager_s:.1%} of the time of eager blocks"
    if gain < least:
        return Blocks(False, f"{measured}, and differences below {least:.0%} do not count")
    compile_s = sum(kind.times.compile_s * kind.variants for kind in kinds)
    saved_s = (eager_s - compiled_s) * micro_batches
    times = f"compilation takes {format_duration(compile_s)}, and the run saves {format_duration(saved_s)}"
    if saved_s < PAYS_TIMES * compile_s:
        return Blocks(False, f"{measured}; {times}")
    needed = max(kind.times.compiler_bytes for kind in kinds)
    if spare_bytes is not None and spare_bytes < needed:
        left = format_bytes(max(0, spare_bytes))
        return Blocks(False, f"the compiler takes {format_bytes(needed)} of host memory, and {left} are left")
    return Blocks(True, f"{measured}; {times}")
