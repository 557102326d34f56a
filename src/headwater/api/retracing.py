"""Dry runs of a model in a user's loop, which an engine may stream already."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parametrize

from headwater.api.calls import Call, stand_in_loss
from headwater.core.interrupts import held_throughout
from headwater.core.module_parameters import named_parameters_of
from headwater.core.precision import Precision
from headwater.core.seeding import drawing_devices
from headwater.core.stage import ParamSpec
from headwater.plan.division import divisions
from headwater.plan.partition import Partition, find_stages
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step, widen_uncast
from headwater.stream.saved_tensors import apart_from_hooks

if TYPE_CHECKING:
    from headwater.api.engine_swap import ReplaceableEngine
    from headwater.stream.engine import Engine


@contextmanager
def restoring_state(model: nn.Module, trained: Collection[str]) -> Iterator[None]:
    """Enter a context for a dry run. At its end, restore everything that the user's loop can see.

    Args:
        model: the model.
        trained: names of the parameters that require gradients in the context.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        apart_from_hooks(),
        _without_cached_parametrizations(),
        _unfrozen(model, trained),
        torch.random.fork_rng(devices=drawing_devices()),  # the user's random state must not change
    ):
        yield


def traces_of(
    current: ReplaceableEngine,
    call: Call,
    precision: Precision,
    old_names: Mapping[str, str],
    *,
    inference: bool,
    device: str,
) -> Iterator[Trace]:
    """Run a model on fake tensors, and yield the trace, then traces with smaller and smaller stages.

    Args:
        current: the model, and its engine if there is one.
        call: the arguments of the forward.
        precision: precision of the run.
        old_names: present name -> name in the engine, of the parameters that the engine streams.
        inference: run only the forward, without gradients.
        device: `cpu` or `cuda`.
    """
    model, engine = current.model, current.engine
    partition = find_stages(model, precision)
    if engine is not None:
        engine.store.flush()  # a pending update must not run among fake tensors
        in_fp32 = precision != engine.plan.precision
        partition = _with_masters_of(engine, partition, old_names, in_fp32=in_fp32)
    with _not_streamed(engine):
        partition = held_throughout(
            widen_uncast,
            partition,
            model,
            call,
            precision,
            loss_function=stand_in_loss,
            inference=inference,
            device=device,
        )
    divided = engine is not None and current.structure.is_current and engine.plan.trace.members
    least = len(engine.plan.trace.stages) if engine is not None and divided else 0
    for each in _at_least(least, chain((partition,), divisions(model, partition))):
        with _not_streamed(engine):
            trace = held_throughout(
                trace_step,
                model,
                call,
                precision,
                loss_function=stand_in_loss,
                partition=each,
                inference=inference,
                device=device,
            )
        yield trace


def _not_streamed(engine: Engine | None) -> AbstractContextManager[None]:
    """Return a context in which a call of the model streams nothing."""
    return nullcontext() if engine is None or engine.is_detached else engine.executor.paused()


def _at_least(num_stages: int, partitions: Iterator[Partition]) -> Iterator[Partition]:
    """Yield the partitions with at least this number of stages, or the last one if none has.

    Blocks that were divided once must stay divided, so that graphs of earlier forwards find their weights.
    """
    partition, is_found = None, False
    for partition in partitions:
        if len(partition.stages) >= num_stages:
            is_found = True
            yield partition
    if partition is not None and not is_found:
        yield partition


def _with_masters_of(
    engine: Engine, partition: Partition, old_names: Mapping[str, str], *, in_fp32: bool
) -> Partition:
    """Return the stages with the dtypes of masters, which differ from those that streamed parameters show."""
    known = {param.name: param for param in engine.plan.trace.params}

    def corrected(param: ParamSpec) -> ParamSpec:
        if param.name not in old_names:
            return param
        old = known[old_names[param.name]]
        return dataclasses.replace(
            param, dtype=old.dtype, wire_dtype=old.dtype if in_fp32 else old.wire_dtype
        )

    return partition.with_params(corrected)


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    """Enter a context without the cache of `parametrize.cached()`, which would keep fake tensors."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


@contextmanager
def _unfrozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Enter a context in which the parameters with these names require gradients."""
    frozen = [
        param for name, param in named_parameters_of(model) if name in names and not param.requires_grad
    ]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
