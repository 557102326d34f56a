"""Loggers whose service is slow, fails or is not installed."""

import subprocess
import sys
import threading

import pytest
import yaml
from test_callbacks import PLAN, run, step

from headwater.config.loggers import LoggerConfig
from headwater.core.errors import ConfigError
from headwater.trainer.callback import FitStart
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tracking import sender
from headwater.trainer.tracking.make import import_packages
from headwater.trainer.tracking.service import Record, flat
from headwater.trainer.tracking.tracker import Service, Tracker


class ServiceRun:
    """A run of a service that fails while `fault` is set, and blocks while `open_gate` is not."""

    identifier, place = "r1", "here"

    def __init__(self, opening=None):
        self.opening, self.steps, self.summary = opening, [], None
        self.fault, self.open_gate = None, threading.Event()
        self.open_gate.set()

    def log(self, records):
        self.open_gate.wait()
        if self.fault is not None:
            raise self.fault
        self.steps += [record.step for record in records]

    def finish(self, summary):
        self.summary = summary


@pytest.fixture
def service():
    return ServiceRun()


def tracker(service, folder, **options):
    def open_run(opening):
        service.opening = opening
        return service

    return Tracker(Service("SomeLogger", open_run, **options), RunDir(folder))


def test_the_end_of_a_run_is_summarized(service, tmp_path):
    run(tracker(service, tmp_path), step(1, 5.0), step(2, 4.0))
    assert service.steps == [1, 2, 2]
    assert (service.summary.status, service.summary.values["final/step"]) == ("stopped", 2)
    assert service.summary.values["final/train/loss"] == 4.0
    assert service.summary.values["final/validate/loss"] == 0.5
    assert service.summary.values["final/tokens"] == 2000


def test_a_run_that_failed_is_marked_as_failed(service, tmp_path):
    callback = tracker(service, tmp_path)
    callback.on_fit_start(FitStart(0, 4, PLAN))
    callback.on_fit_error(RuntimeError())
    callback.on_fit_end()
    assert service.summary.status == "failed"


def test_a_run_that_continues_names_its_earlier_run(service, tmp_path):
    run(tracker(service, tmp_path), step(1), step(2))
    assert service.opening.continued is None
    run(tracker(service, tmp_path), step(3), start=2)
    assert service.opening.continued == "r1"
    run(tracker(service, tmp_path, resume="never"), step(3), start=2)
    assert service.opening.continued is None
    run(tracker(service, tmp_path), step(1))
    assert service.opening.continued is None, "a run that starts over is a new run"


def test_resume_must_needs_an_earlier_run(service, tmp_path):
    with pytest.raises(ConfigError, match="expected an earlier run") as error:
        run(tracker(service, tmp_path, resume="must"), step(1))
    assert "SomeLogger" in str(error.value)


def test_a_failing_service_causes_one_warning_and_gets_all_records_later(
    service, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(sender, "_RETRY_S", 0.0)
    callback = tracker(service, tmp_path)
    callback.on_fit_start(FitStart(0, 4, PLAN))
    service.fault = OSError("no space left at https://me:secret@host")
    for number in range(1, 5):
        callback.on_step_end(step(number))
    for _ in range(1000):
        if any(record.levelname == "WARNING" for record in caplog.records):
            break
        threading.Event().wait(0.01)
    service.fault = None
    callback.on_fit_end()
    assert service.steps == [1, 2, 3, 4] and service.summary.status == "complete"
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "SomeLogger" in warning.message and "the training continues" in warning.message
    assert "secret" not in caplog.text


def test_a_service_that_does_not_answer_delays_no_step(service, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sender, "_END_S", 0.05)
    callback = tracker(service, tmp_path)
    callback.on_fit_start(FitStart(0, 4, PLAN))
    service.open_gate.clear()
    for number in range(1, 5):
        callback.on_step_end(step(number))
    callback.on_fit_end()
    service.open_gate.set()
    assert "not sent within" in caplog.text


def test_records_that_a_slow_service_cannot_take_are_dropped(caplog, monkeypatch):
    monkeypatch.setattr(sender, "_MOST_RECORDS", 3)
    unstarted = sender.Sender("SomeLogger", ServiceRun)
    for number in range(5):
        unstarted.send(Record(number, 0.0, {}))
    assert len(caplog.records) == 1 and "too slow" in caplog.text


@pytest.mark.parametrize(
    ("name", "module"), [("WandbLogger", "wandb"), ("MLflowLogger", "mlflow"), ("TrackioLogger", "trackio")]
)
def test_a_missing_package_is_named_with_its_command(name, module, monkeypatch):
    class Init:
        trackers = (LoggerConfig.model_validate({name: {}}).chosen,)

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{name} needs the package {module}") as error:
        import_packages(Init)
    assert f"pip install 'headwater[{module}]'" in error.value.remedy


@pytest.mark.real_start
def test_the_packages_are_imported_only_if_a_run_names_them():
    program = (
        "import sys, headwater, headwater.trainer.session, headwater.cli.fit\n"
        "print({'wandb', 'mlflow', 'trackio'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_params_are_flat_and_have_no_secrets(service, tmp_path):
    callbacks = [{"ComputeNorm": {}}, {"SlackNotification": {"url": "https://secret"}}]
    params = {"trainer": {"init": {"seed": 3, "callbacks": callbacks, "loggers": []}}}
    RunDir(tmp_path).params.write_text(yaml.safe_dump(params))
    run(tracker(service, tmp_path), step(1))
    assert "secret" not in str(service.opening.params)
    assert flat(service.opening.params)["trainer.init.seed"] == 3
    assert flat({"a": [{"b": 1}, 2]}) == {"a.0.b": 1, "a.1": 2}
