"""The program of a child process, which makes one run: `python -m headwater.conform.child REQUEST`."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headwater
from headwater.conform.plans import with_enough_slabs
from headwater.conform.ranks import NUM_CSX, train_in_parts, train_ranks
from headwater.conform.record import Shown
from headwater.conform.subject import Subject, load_subject, seed_all
from headwater.conform.train import Course, train
from headwater.core.errors import HeadwaterError
from headwater.core.precision import Precision, PrecisionName
from headwater.fabric.membership import current

PLAIN, PARTS, RANKS = "plain", "plain_in_parts", "ranks"


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to a process for one run.

    Attributes:
        target: the model; see `load_subject`.
        run: name of a plan, or `PLAIN`, `PARTS` or `RANKS`.
        steps: number of steps.
        seed: seed of initial values and random numbers.
        observed: see `Course`.
        folder: folder of the disk tier.
        result: file for the values, or for the error.
        precision: precision of the forwards.
    """

    target: str
    run: str
    steps: int
    seed: int
    observed: bool
    folder: str
    result: str
    precision: PrecisionName = "fp32"


def main(request_file: Path) -> None:
    """Run a request and write its result."""
    # After a crash the report shows the end of stderr, to which this writes the stack.
    faulthandler.enable()
    torch.set_num_threads(1)
    request = Request(**json.loads(request_file.read_text()))
    result = outcome_of(request)
    if current().rank == 0:
        # Renamed when it is complete: the parent takes any result file for a whole one, even after a crash.
        unfinished = f"{request.result}.partial"
        torch.save(result, unfinished)
        Path(unfinished).replace(request.result)


def outcome_of(request: Request) -> dict[str, Any]:
    """Run a request in this process and return its values, or how it failed."""
    try:
        return {"status": "ok", "shown": _run(request)}
    except HeadwaterError as error:
        return {"status": "refused", "message": str(error)}
    except Exception as error:  # noqa: BLE001 - any error of the user's model is reported
        trace = traceback.format_exc()
        return {"status": "failed", "message": f"{type(error).__name__}: {error}", "trace": trace}


def _run(request: Request) -> list[Shown]:
    """Train the model as the request says, and return the values recorded at each step."""
    course = Course(request.steps, request.seed, request.observed, Precision(request.precision))
    if request.run == RANKS:
        backend = headwater.backend("CSX", num_csx=NUM_CSX)
        return train_ranks(_subject(request), course, lambda model: headwater.compile(model, backend))
    if request.run == PARTS:
        return train_in_parts(_subject(request), course)
    if request.run == PLAIN:
        subject = _subject(request)
        return train(subject, course, lambda model: model)

    def streamed(options: Any) -> list[Shown]:
        backend = headwater.backend("CSX", **options)

        def prepare(model: nn.Module) -> nn.Module:
            return headwater.compile(model, backend)

        # Loaded again in each attempt: one that was refused may have trained the model.
        return train(_subject(request), course, prepare)

    return with_enough_slabs(request.run, Path(request.folder), streamed)


def _subject(request: Request) -> Subject:
    """Return the model with its initial values."""
    seed_all(request.seed)
    return load_subject(request.target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
