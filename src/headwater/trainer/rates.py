"""Callbacks that measure the speed of a run: samples per second, and use of the device's arithmetic."""

from __future__ import annotations

import abc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from headwater.core.errors import HeadwaterError
from headwater.core.files import replace_file
from headwater.plan.calibrate import calibrate
from headwater.plan.types import Plan
from headwater.trainer.callback import Callback, FitStart, StepEnd

logger = logging.getLogger(__name__)

_NEW_SHARE = 0.4
"""Share of the newest step in `local_samples_per_sec`, as in the Model Zoo, and in `local_tokens_per_sec`."""


class Meter(Callback):
    """Interface of a callback that measures the speed of the steps of this process.

    Only training steps count, with their waits for data. Evaluations and checkpoints do not count.
    """

    @abc.abstractmethod
    def totals(self) -> Mapping[str, float]:
        """Return numbers about all steps so far, by name; nothing before the first step."""


@final
class RateProfiler(Meter):
    """Measures samples, tokens and steps per second. Samples are those of the whole batch, of all ranks."""

    def __init__(self) -> None:
        self._steps = 0
        self._samples = 0
        self._tokens = 0
        self._seconds = 0.0
        self._local = 0.0
        self._local_tokens = 0.0

    def measure(self, event: StepEnd) -> Mapping[str, float]:
        self._steps += 1
        self._samples += event.samples
        self._tokens += event.tokens
        self._seconds += event.step_s
        self._local = self._latest(self._local, event.samples / event.step_s)
        self._local_tokens = self._latest(self._local_tokens, event.tokens / event.step_s)
        rates = {
            "local_samples_per_sec": self._local,
            "avg_samples_per_sec": self._samples / self._seconds,
            "avg_steps_per_sec": self._steps / self._seconds,
        }
        if self._tokens:
            rates["local_tokens_per_sec"] = self._local_tokens
            rates["avg_tokens_per_sec"] = self._tokens / self._seconds
        return rates

    def _latest(self, before: float, newest: float) -> float:
        """Return the rate of the latest steps: that of the first step, then a moving average."""
        return newest if self._steps == 1 else _NEW_SHARE * newest + (1 - _NEW_SHARE) * before

    def totals(self) -> Mapping[str, float]:
        if not self._steps:
            return {}
        rate = self._samples / self._seconds
        # The same rate under two names, as in the Model Zoo.
        return {
            "total_samples": self._samples,
            "total_time": self._seconds,
            "rate": self._local,
            "global_rate": rate,
            "samples_per_sec": rate,
        }


@final
class FlopUtilization(Meter):
    """Measures the model's FLOP/s in percent of the FLOP/s that large matrix products reach on this device.

    The model's FLOPs are those of forward and backward in the dry run, without recomputed forwards. All ranks
    do the same amount of work, so the share of one rank is that of all.

    Args:
        flops_per_s: returns the FLOP/s of matrix products on a rank's device; `None` if it was not measured.
    """

    def __init__(self, flops_per_s: Callable[[Plan], float | None]) -> None:
        self._flops_per_s = flops_per_s
        self._share_of_step: float | None = None  # the result, in percent, if a step took one second
        self._steps = 0
        self._seconds = 0.0

    def on_fit_start(self, event: FitStart) -> None:
        most = self._flops_per_s(event.plan)
        if most is None:
            logger.warning(
                "FlopUtilization reports nothing: the speed of this machine was not measured; "
                "`headwater plan --recalibrate` measures it"
            )
        else:
            self._share_of_step = 100 * model_flops(event.plan) / most

    def measure(self, event: StepEnd) -> Mapping[str, float]:
        self._steps += 1
        self._seconds += event.step_s
        return self.totals()

    def totals(self) -> Mapping[str, float]:
        if self._share_of_step is None or not self._steps:
            return {}
        return {"flops_utilization": self._share_of_step * self._steps / self._seconds}


@final
class PerformanceFile(Callback):
    """Writes what the meters have measured to a JSON file at the end of the run, or warns.

    A run without steps leaves the file of an earlier run as it is.

    Args:
        path: the file.
        meters: the meters of the run.
    """

    def __init__(self, path: Path, meters: Sequence[Meter]) -> None:
        self._path = path
        self._meters = meters

    def on_fit_start(self, event: FitStart) -> None:
        if not self._meters:
            logger.warning(
                "SavePerformanceData writes nothing: expected RateProfiler or FlopUtilization, which measure "
                "the speed; add one of them to trainer.init.callbacks"
            )

    def on_fit_end(self) -> None:
        totals = {name: value for meter in self._meters for name, value in meter.totals().items()}
        if not totals:
            return
        try:
            replace_file(self._path, json.dumps(totals, indent=1).encode())
        except HeadwaterError as error:
            logger.warning("%s was not written; the training is not affected: %s", self._path.name, error)


def model_flops(plan: Plan) -> int:
    """Return the FLOPs of forward and backward of one step on one rank, without recomputed forwards."""
    flops = sum(cost.forward.flops + cost.backward.flops for cost in plan.trace.costs)
    return plan.num_micro_batches * flops


def measured_flops_per_s(plan: Plan) -> float | None:
    """Return the FLOP/s of large matrix products on a rank's device; `None` if it was not measured."""
    rates = calibrate(plan.device, plan.disk, kernels=plan.kernels)
    return None if rates is None else rates.flops_per_s(plan.precision.name)
