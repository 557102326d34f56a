"""The walk of one class: build a small model, find inputs, train in both ways and compare."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.transformers_walk.catalogue import Entry
from benchmarks.transformers_walk.inputs import candidates
from benchmarks.transformers_walk.overrides import attributes_of, inputs_of
from benchmarks.transformers_walk.shrink import Scale, tiny
from benchmarks.transformers_walk.train import History, Job, train_plain, train_streamed

SCALES = (
    Scale(None),
    Scale(None, layers=None),
    Scale(16, image=64),
    Scale(16, image=224),
    Scale(4, image=64),
    Scale(1, image=224),
)
_MOST_CANDIDATES = 24
_MOST_NUMEL = 80_000_000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a class.

    Attributes:
        entry: the class.
        built: True if a tiny model trains in plain PyTorch.
        equal: True if the streamed run has the same bits; `None` if not built.
        inputs: names of the inputs of its forward.
        reason: why it is not built or not equal, else empty.
        numel, stages, slabs: parameters, stages and slabs of the streamed model.
        seconds: duration in seconds.
    """

    entry: Entry
    built: bool
    equal: bool | None
    inputs: tuple[str, ...] = ()
    reason: str = ""
    numel: int = 0
    stages: int = 0
    slabs: int = 0
    seconds: float = 0.0


def walk(entry: Entry) -> Outcome:
    """Build, train, stream and compare one class."""
    start = time.perf_counter()
    try:
        job, plain = _smallest_job(entry)
    except _NotBuiltError as error:
        return Outcome(entry, built=False, equal=None, reason=str(error), seconds=time.perf_counter() - start)
    outcome = Outcome(entry, built=True, equal=False, inputs=tuple(sorted(job.inputs)))
    try:
        streamed = train_streamed(job)
    except Exception as error:
        return dataclasses.replace(outcome, reason=_story(error), seconds=time.perf_counter() - start)
    difference = streamed.history.difference(plain)
    if difference and train_plain(job).difference(plain):
        difference = f"two runs of plain PyTorch differ too; {difference}"
    return dataclasses.replace(
        outcome,
        equal=not difference,
        reason=difference,
        numel=streamed.numel,
        stages=streamed.stages,
        slabs=streamed.slabs,
        seconds=time.perf_counter() - start,
    )


class _NotBuiltError(Exception):
    pass


def _smallest_job(entry: Entry) -> tuple[Job, History]:
    """Return the smallest job that trains in plain PyTorch.

    Raises:
        _NotBuiltError: if no job trains; with the error of the first.
    """
    first = ""
    for scale in SCALES:
        try:
            return _job(entry, scale)
        except ImportError as error:
            raise _NotBuiltError(_story(error)) from error
        except Exception as error:
            first = first or (str(error) if isinstance(error, _NotBuiltError) else _story(error))
    raise _NotBuiltError(first)


def _job(entry: Entry, scale: Scale) -> tuple[Job, History]:
    """Return the first inputs that a model of this scale accepts, and its plain training."""
    config = tiny(entry.model_class().config_class(), scale, attributes_of(entry))
    model_class: Callable[..., nn.Module] = entry.model_class()
    make_model = functools.partial(model_class, config)
    if _numel(make_model) > _MOST_NUMEL:
        raise _NotBuiltError("too large")
    torch.manual_seed(0)
    first = "no inputs found"
    tries = itertools.islice(candidates(make_model(), inputs_of(entry)), _MOST_CANDIDATES)
    for number, make_inputs in enumerate(tries):
        try:
            job = Job(make_model, make_inputs())
            return job, train_plain(job)
        except Exception as error:
            # Wrong inputs make a model of the library fail in any way. Then the next ones are tried, and if
            # all fail, the report shows the first error.
            if not number:
                first = f"no inputs found: {_story(error)}"
    raise _NotBuiltError(first)


def _numel(make_model: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of a model; 0 if it cannot be built without memory."""
    with torch.device("meta"):
        try:
            return sum(param.numel() for param in make_model().parameters())
        except Exception:  # constructors of the transformers library fail on meta tensors in many ways
            # Such a model counts as small: the walk builds it on the CPU next, and reports an error of that.
            return 0


def _story(error: Exception) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1].strip() if "validation" in lines[0].lower() else lines[0]
    return f"{type(error).__name__}: {line}"
