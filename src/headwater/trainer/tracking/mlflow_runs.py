"""Runs of MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

from headwater.config.loggers import MLflowLoggerConfig
from headwater.trainer.tracking.service import Opening, Record, Summary, flat

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_MOST_METRICS, _MOST_PARAMS, _LONGEST_VALUE = 1000, 100, 6000
"""Maximum metrics, params and characters of a value in one request to MLflow."""
_STATUS = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FOLDER = "mlruns"

Item = TypeVar("Item")


@final
class MLflowRun:
    """An open run of MLflow.

    Args:
        config: the arguments in the params.
        opening: the run.
    """

    def __init__(self, config: MLflowLoggerConfig, opening: Opening) -> None:
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = _client(uri or (opening.folder.absolute() / _FOLDER).as_uri())
        self._place = uri or str(opening.folder / _FOLDER)
        self._run_id = opening.continued or self._new_run(config, opening)
        if opening.continued is not None:
            self._client.update_run(self._run_id, status="RUNNING")
        self._log_params(flat(opening.params))

    @property
    def identifier(self) -> str:
        return self._run_id

    @property
    def place(self) -> str:
        # This is printed, so it must not have the user and password that an address may contain.
        return f"run {self._run_id} in {re.sub(r'//[^/@]+@', '//', self._place)}"

    def log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), float(value), int(1000 * record.time), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for group in _groups(metrics, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=group)

    def finish(self, summary: Summary) -> None:
        for name, value in summary.values.items():
            self._client.log_metric(self._run_id, _name(name), value)
        self._client.set_tag(self._run_id, "status", summary.status)
        self._client.set_terminated(self._run_id, _STATUS[summary.status])

    def _new_run(self, config: MLflowLoggerConfig, opening: Opening) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment_name)
        number = (
            self._client.create_experiment(config.experiment_name)
            if experiment is None
            else experiment.experiment_id
        )
        name = config.run_name or opening.folder.absolute().name
        return str(self._client.create_run(number, tags=dict(config.tags), run_name=name).info.run_id)

    def _log_params(self, params: dict[str, Any]) -> None:
        """Log the params that the run does not have yet. MLflow raises an error if a value changes."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        new = [
            Param(_name(name), str(value)[:_LONGEST_VALUE])
            for name, value in params.items()
            if _name(name) not in known
        ]
        for group in _groups(new, _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=group)


def _client(uri: str) -> MlflowClient:
    if "://" not in uri or uri.startswith("file:"):
        # Newer versions of MLflow need this to store runs in a folder. mlflow-skinny cannot use a database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def _name(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _groups(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Yield the items in lists of at most `count`."""
    found = list(items)
    for begin in range(0, len(found), count):
        yield found[begin : begin + count]
