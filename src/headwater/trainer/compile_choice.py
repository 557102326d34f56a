"""The choice of a run between compiled and eager blocks (`compile: auto`).

[Note: compiled blocks by measurement]
Compiled blocks round differently from eager blocks, so the choice decides the bits of a run. It is made
before the first step, on rank 0, and is a part of the plan, which all ranks get. Checkpoints record it, and a
run that continues takes the recorded choice. The times are measured on copies of blocks in another process,
which have random weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwater.core.errors import DoesNotFitError
from headwater.core.patience import notice_if_long
from headwater.core.trees import tensors_in
from headwater.core.units import MIB, format_bytes
from headwater.core.version import __version__
from headwater.optim.spec import NO_UPDATES
from headwater.plan.compilation import MOST_VARIANTS, BlockTimes, Kind, choose, repeated_stages, too_short
from headwater.plan.machine import free_host_bytes
from headwater.plan.machine_cache import cache_file, machine_key, read_entries, write_entries
from headwater.plan.measuring import NEEDED_BYTES
from headwater.plan.types import Activations, Blocks, Plan
from headwater.stream.block_call import find_calls, pack
from headwater.stream.block_measuring import measure_block
from headwater.stream.block_probe import Conditions

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig
    from headwater.trainer.job import Trainable
    from headwater.trainer.planning import Workload

logger = logging.getLogger(__name__)

_FILE = "compiled_blocks.json"
_LIFE_S = 30 * 86_400.0
"""Seconds for which a measurement is used."""
_COMPILER_BYTES = 300 * MIB
_SAVED_COPIES = 4
"""Copies of a block's activations that exist at once while it is measured, its gradients included."""
_PLAIN = (bool, int, float, str, type(None))


def block_choice(
    init: CommonInitConfig, trainable: Trainable, plan: Plan, work: Workload, *, measure: bool
) -> Blocks:
    """Return the choice for a run: compiled or eager blocks.

    Args:
        init: the params.
        trainable: the model with its loss.
        plan: the plan of the run.
        work: the step, the number of steps, and the choice that a checkpoint recorded.
        measure: measure blocks whose times are not known. If false, such blocks are eager, and the reason
            says that the run will measure them.
    """
    if init.backend.compile != "auto":
        return plan.blocks
    if work.optimizer is NO_UPDATES:
        return Blocks()
    if work.compiled is not None:
        return Blocks(work.compiled, "this run began so, as its checkpoint records")
    groups = repeated_stages(plan.trace.stages, lambda name: type(trainable.model.get_submodule(name)))
    run = _Run(trainable, plan, groups)
    refusal = _refusal(run, work.steps)
    if refusal is not None:
        return Blocks(False, refusal)
    assert work.steps is not None, "a run of unknown length was refused"
    known = [_known(run.key(group)) for group in groups]
    if None in known:
        refusal = _too_short(plan, work.steps)
        if refusal is not None or not measure:
            return Blocks(False, refusal or "not measured yet; the run measures blocks before its first step")
        with notice_if_long("measuring eager and compiled blocks"):
            measured = _measure(run)
        if isinstance(measured, str):
            return Blocks(False, measured)
        known = list(measured)
    kinds = [
        Kind(times, len(group), run.recomputed(group), run.variants(group))
        for group, times in zip(groups, known, strict=True)
        if times is not None
    ]
    return choose(kinds, work.steps * plan.num_micro_batches, _spare_bytes(plan))


def plan_with_blocks(
    work: Workload, plan_for: Callable[[Workload], Plan], choose: Callable[[Plan], Blocks]
) -> Plan:
    """Return a plan with its choice between compiled and eager blocks.

    For a compiled block the compiler, not the plan, decides which activations are saved. So if the plan for
    eager blocks recomputes cheap operators, compiled blocks need another plan. If that does not fit, the run
    has eager blocks.

    Args:
        work: the step.
        plan_for: returns a plan of a step; raises `DoesNotFitError` if none fits.
        choose: returns the choice for a plan; see `block_choice`.
    """
    plan = plan_for(work)
    blocks = choose(plan)
    if blocks.compiled and Activations.SELECTIVE in plan.activations:
        try:
            other = plan_for(dataclasses.replace(work, compiled=True))
        except DoesNotFitError:
            blocks = Blocks(False, "what compiled blocks keep for the backward does not fit")
        else:
            blocks = choose(other)  # batch, stages and free memory may differ from the first plan
            plan = other if blocks.compiled else plan
    return dataclasses.replace(plan, blocks=blocks)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The blocks of a run.

    Attributes:
        trainable: the model with its loss.
        plan: the plan.
        groups: the stages that would be compiled, by shapes.
    """

    trainable: Trainable
    plan: Plan
    groups: Sequence[Sequence[int]]

    def name(self, group: Sequence[int]) -> str:
        """Return the name of the block that is measured for a group.

        This is the second block. Inputs of the first block may need no gradients, and then it computes less.
        """
        return self.plan.trace.stages[group[min(1, len(group) - 1)]].name

    def dtypes(self, group: Sequence[int]) -> dict[str, torch.dtype]:
        """Return the dtype of each parameter of the measured block, by its name in the block."""
        name = self.name(group)
        stage = next(stage for stage in self.plan.trace.stages if stage.name == name)
        return {param.name.removeprefix(f"{name}."): param.wire_dtype for param in stage.params}

    def recomputed(self, group: Sequence[int]) -> int:
        """Return the number of blocks whose forward runs again in backward."""
        return sum(self.plan.activations[stage].is_recomputed for stage in group)

    def variants(self, group: Sequence[int]) -> int:
        """Return the number of different constants among the blocks of a group."""
        blocks = (self.trainable.model.get_submodule(self.plan.trace.stages[stage].name) for stage in group)
        return len({repr(_constants(block)) for block in blocks})

    @property
    def most_variants(self) -> int:
        """Largest number of variants of a function that the compiler makes in training and evaluation.

        A function has a variant for each constant and each shape of its blocks, a second one of each without
        gradients, and one for a first block whose input needs no gradient.
        """
        of_function = Counter[object]()
        for group in self.groups:
            of_function[type(self.trainable.model.get_submodule(self.name(group)))] += self.variants(group)
        return 2 * max(of_function.values()) + 1

    def needed_bytes(self, group: Sequence[int]) -> int:
        """Return the host memory that the measurement of a group needs."""
        stage, cost = self.plan.trace.stages[group[0]], self.plan.trace.costs[group[0]]
        return NEEDED_BYTES + _COMPILER_BYTES + 2 * stage.slab_bytes + _SAVED_COPIES * cost.saved_bytes

    def key(self, group: Sequence[int]) -> str:
        """Return the name of a measurement: the machine, and a digest of the code and shapes of the block."""
        model, name = self.trainable.model, self.name(group)
        example = self.trainable.example(self.plan.micro_batch_size)
        parts: tuple[Any, ...] = (
            __version__,
            repr(model),
            _constants(model.get_submodule(name)),
            sorted((param, str(dtype)) for param, dtype in self.dtypes(group).items()),
            [tuple(param.shape) for param in self.plan.trace.stages[group[0]].params],
            [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(example)],
            (self.plan.precision.name, self.plan.kernels, _sources(model)),
        )
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return f"{machine_key(self.plan.device)}|{digest}"


def _refusal(run: _Run, steps: int | None) -> str | None:
    """Return why blocks stay eager in any case; `None` if a measurement can decide."""
    if not run.plan.precision.mixed:
        return "an fp32 run keeps the bits of torch"
    if run.plan.trace.members:
        return "blocks are divided into smaller stages"
    if not run.groups:
        return "no two stages have the same class and equal shapes"
    if run.plan.converts_half_products:
        return "on this CPU other kernels replace single products, which compiled blocks do not have"
    if steps is None:
        return "the number of steps is known only to the run itself, which measures blocks"
    if run.most_variants > MOST_VARIANTS:
        return (
            "blocks of one class differ in constants or shapes: training and evaluation need "
            f"{run.most_variants} variants, and torch compiles {MOST_VARIANTS}"
        )
    return None


def _too_short(plan: Plan, steps: int) -> str | None:
    """Return why the run is too short for a measurement, or has an unknown length."""
    step_s = None if plan.prediction is None else plan.prediction.step_s
    return "the speed of this machine is not known" if step_s is None else too_short(step_s, steps)


def _spare_bytes(plan: Plan) -> int | None:
    """Return the host memory that a plan leaves free; `None` without a limit."""
    if plan.host_limit is None or plan.prediction is None:
        return None
    return plan.host_limit - plan.prediction.host_bytes


def _measure(run: _Run) -> list[BlockTimes] | str:
    """Measure one block of each group, store the times and return them. If that fails, return the reason."""
    plan, trainable = run.plan, run.trainable
    free = free_host_bytes(plan.host_limit)
    needed = max(map(run.needed_bytes, run.groups))
    if free < needed:
        left = format_bytes(max(0, free))
        return f"measuring a block takes {format_bytes(needed)} of host memory, and {left} are free"
    names = list(map(run.name, run.groups))
    example = trainable.example(plan.micro_batch_size)
    calls = find_calls(trainable.model, example, plan.precision, trainable.loss, names, plan.device)
    conditions = Conditions(
        plan.device, plan.precision.name, torch.get_num_threads(), plan.kernels, list(sys.path)
    )
    measured = []
    for group, name in zip(run.groups, names, strict=True):
        if name not in calls:
            return f"the model does not call {name}"
        try:
            packed = pack(calls[name], run.dtypes(group))
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            return f"{name} or its inputs cannot be copied to another process: {error}"
        times = measure_block(packed, conditions)
        if isinstance(times, str):
            return f"{name}: {times}"
        _remember(run.key(group), times)
        measured.append(times)
    return measured


def _known(key: str) -> BlockTimes | None:
    """Return the stored times of a block; `None` if they are missing, old or damaged."""
    match read_entries(cache_file(_FILE)).get(key):
        case {"times": dict(times), "taken_s": float(taken_s)} if 0 <= time.time() - taken_s < _LIFE_S:
            fields = {field.name for field in dataclasses.fields(BlockTimes)}
            numbers = all(type(value) in (int, float) and 0 <= value < math.inf for value in times.values())
            known = BlockTimes(**times) if times.keys() == fields and numbers else None
            return known if known is not None and known.eager_forward_s + known.eager_backward_s > 0 else None
    return None


def _remember(key: str, times: BlockTimes) -> None:
    """Store the times of a block."""
    cache = cache_file(_FILE)
    entry = {"times": dataclasses.asdict(times), "taken_s": time.time()}
    write_entries(cache, read_entries(cache) | {key: entry}, what="the times of compiled blocks")


def _constants(block: nn.Module) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the class and the constants of each module in a block."""
    return [
        (name, type(module).__qualname__, {k: v for k, v in vars(module).items() if type(v) in _PLAIN})
        for name, module in block.named_modules()
    ]


def _sources(model: nn.Module) -> list[str]:
    """Return digests of the files that define the classes of a model; for torch its version."""
    modules = {type(module).__module__ for module in model.modules()}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules if name[:6] != "torch."}
    found = (Path(file) for file in files if file is not None)
    return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in found if file.is_file())
