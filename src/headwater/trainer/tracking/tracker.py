"""The callback that sends a run to a service."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import yaml

from headwater.config.loggers import Resume
from headwater.core.errors import ConfigError
from headwater.core.files import replace_file
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd
from headwater.trainer.run_dir import RunDir
from headwater.trainer.scalars import step_scalars, task_scalars, validation_scalars
from headwater.trainer.tracking.sender import Sender
from headwater.trainer.tracking.service import Opening, OpenRun, Record, ServiceRun, Status, Summary
from headwater.trainer.waits import log_if_long

logger = logging.getLogger(__name__)

_WITH_SECRETS = ("Notification", "EmailNotification", "SlackNotification")
"""Callbacks whose arguments may be secret: URLs of hooks, and commands."""


@dataclasses.dataclass(frozen=True)
class Service:
    """A service as the params describe it.

    Attributes:
        name: name of the logger in the params.
        open_run: opens a run.
        resume: see `headwater.config.loggers.Resume`.
        run_id: the identifier that the params name for the run.
    """

    name: str
    open_run: OpenRun
    resume: Resume = "auto"
    run_id: str | None = None


@final
class Tracker(Callback):
    """Sends the params, the numbers and the end of a run to a service.

    A run that continues is logged into its earlier run. A service that fails never ends the training.

    Args:
        service: the service.
        run_dir: files of the run.
        log_steps: steps between two records of training.
    """

    def __init__(self, service: Service, run_dir: RunDir, log_steps: int = 1) -> None:
        self._service = service
        self._run_dir = run_dir
        self._log_steps = log_steps
        self._sender: Sender | None = None
        self._began = 0.0
        self._start_step, self._end_step = 0, 0
        self._tokens = 0
        self._last: dict[str, float] = {}
        self._failed = False

    def on_fit_start(self, event: FitStart) -> None:
        self._start_step, self._end_step = event.start_step, event.end_step
        self._last["step"] = event.start_step
        self._began = time.monotonic()
        opening = Opening(self._run_dir.path, logged_params(self._run_dir), self._continued())
        self._sender = Sender(self._service.name, lambda: self._open(opening))
        with log_if_long(f"{self._service.name}: connecting"):
            self._sender.start()

    def on_step_end(self, event: StepEnd) -> None:
        self._last |= {"step": event.step, "train/loss": event.loss}
        self._tokens += event.tokens
        if event.step % self._log_steps == 0:
            self._send(event.step, step_scalars(event))

    def on_validate_end(self, event: ValidateEnd) -> None:
        values = validation_scalars(event)
        self._last |= values
        self._send(event.step, values)

    def on_scores(self, step: int, scores: Mapping[str, float]) -> None:
        values = task_scalars(scores)
        self._last |= values
        self._send(step, values)

    def on_fit_error(self, error: BaseException) -> None:
        self._failed = True

    def on_fit_end(self) -> None:
        if self._sender is None:
            return
        finished = self._last["step"] >= self._end_step
        status: Status = "failed" if self._failed else "complete" if finished else "stopped"
        values = {**self._last, "seconds": time.monotonic() - self._began, "tokens": self._tokens}
        with log_if_long(f"{self._service.name}: sending the last numbers"):
            self._sender.finish(Summary(status, {f"final/{name}": value for name, value in values.items()}))

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        assert self._sender is not None, "a run starts before its first step"
        self._sender.send(Record(step, time.time(), values))

    def _open(self, opening: Opening) -> ServiceRun:
        """Open the run, and keep its identifier for later processes."""
        run = self._service.open_run(opening)
        logger.info("%s: %s", self._service.name, run.place)
        replace_file(self._identifier_file, json.dumps({"run_id": run.identifier}).encode())
        return run

    def _continued(self) -> str | None:
        """Return the identifier of the earlier run to continue; `None` for a new one.

        Raises:
            ConfigError: if the params require an earlier run that does not exist.
        """
        resume, named = self._service.resume, self._service.run_id
        if resume == "never":
            return None
        # A run that starts over is a new run, even if its folder has the identifier of the run before.
        found = named or (self._known() if self._start_step else None)
        if resume == "must" and found is None:
            raise ConfigError(
                "expected an earlier run for resume: must, found no run in this model_dir",
                where=f"trainer.init.loggers: {self._service.name}",
                remedy="write resume: auto",
            )
        return found

    @property
    def _identifier_file(self) -> Path:
        return self._run_dir.path / f"logged_run_{self._service.name}.json"

    def _known(self) -> str | None:
        """Return the identifier that an earlier process has kept."""
        try:
            found = json.loads(self._identifier_file.read_bytes())
            return str(found["run_id"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def logged_params(run_dir: RunDir) -> dict[str, Any]:
    """Return the params of a run as resolved, without the arguments of notifications, which may be secret."""
    try:
        found = yaml.safe_load(run_dir.params.read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    return _public(found) if isinstance(found, dict) else {}


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(each) for key, each in value.items() if key not in _WITH_SECRETS}
    return [_public(each) for each in value] if isinstance(value, list) else value
