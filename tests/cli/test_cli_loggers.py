"""Runs with loggers of other packages, read back with these packages. Nothing is sent over a network."""

import json
import math
import struct
import sys
import time

import pytest
from run_samples import history


@pytest.fixture
def logged(headwater, params):
    """Trains with a logger, in one or more processes of the run; returns what they print on stderr."""

    def fit(logger, *words, code=0):
        found = headwater("fit", params, f"trainer.init.loggers={json.dumps([logger])}", *words)
        assert found[0] == code, found
        return found[2]

    return fit


def records_of_leveldb(data):
    """Yield the complete records of a log in LevelDB's format. Its first block begins with 7 other bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if position + 7 + length > len(data):
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def all_records_of_wandb(path, seconds=60):
    """Return the records of an offline run. W&B's own process may write the last ones after the run."""
    from wandb.proto.wandb_internal_pb2 import Record

    end = time.monotonic() + seconds
    while True:
        records = [Record.FromString(data) for data in records_of_leveldb(path.read_bytes())]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        assert time.monotonic() < end, f"{path} has no last record"
        time.sleep(0.05)


def runs_of_wandb(folder):
    """Return (identifier, rows of numbers, config, summary) of each offline run; the oldest first."""
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        rows, config, summary, identifier = [], {}, {}, None
        for record in all_records_of_wandb(path):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            elif record.WhichOneof("record_type") == "run":
                identifier = record.run.run_id
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "summary":
                items = record.summary.update
                summary |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
        runs.append((identifier, rows, config, summary))
    return runs


def test_weights_and_biases_keeps_a_run_in_offline_mode(logged, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delitem(sys.modules, "openai", raising=False)  # the package advertises beside it
    logger = {"WandbLogger": {"project": "small", "mode": "offline", "tags": ["a", "b"], "resume": "auto"}}
    assert logged(logger, "--max_steps=4") == ""
    assert logged(logger) == ""
    first, second = runs_of_wandb(tmp_path / "run")
    assert first[0] == second[0], "the run that continues is the same run of W&B"
    rows = [row for run in (first, second) for row in run[1]]
    losses = {row["global_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    expected = [(r["step"], r["loss"]) for r in history(tmp_path / "run") if r["kind"] == "train"]
    assert list(losses.items()) == expected
    assert {row["global_step"] for row in rows if "validate/loss" in row} == {3, 4, 6}
    assert first[2]["trainer"]["init"]["model"]["hidden_size"] == 32
    assert (first[3]["status"], second[3]["status"]) == ("complete", "complete")
    assert second[3]["final/step"] == 6 and second[3]["final/train/loss"] == expected[-1][1]


def test_weights_and_biases_needs_a_key_or_the_offline_mode(headwater, params, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/does/not/exist")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    code, _, err = headwater("fit", params, 'trainer.init.loggers={"WandbLogger": {"mode": "online"}}')
    assert code == 2 and "mode: offline" in err and "WandbLogger" in err


def test_mlflow_keeps_a_run_in_a_folder(logged, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    from mlflow.tracking import MlflowClient

    logger = {"MLFlowLogger": {"experiment_name": "small", "tags": {"team": "a"}}}
    assert logged(logger, "--max_steps=4") == ""
    client = MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    number = client.get_experiment_by_name("small").experiment_id
    (before,) = client.search_runs([number])
    assert (before.info.status, before.data.params["trainer.init.loop.max_steps"]) == ("FINISHED", "4")
    assert logged(logger) == ""
    (run,) = client.search_runs([number])
    assert (run.info.run_id, run.info.run_name) == (before.info.run_id, "run")
    assert run.data.params["trainer.init.model.hidden_size"] == "32"
    found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
    expected = {r["step"]: r["loss"] for r in history(tmp_path / "run") if r["kind"] == "train"}
    assert found == expected
    assert run.data.metrics["final/step"] == 6 and run.data.metrics["validate/loss"] > 0
    assert run.data.tags["status"] == "complete" and run.data.tags["team"] == "a"


def test_a_folder_of_mlflow_that_is_lost_does_not_end_the_training(logged, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "file").write_text("")
    err = logged({"MLflowLogger": {"tracking_uri": str(tmp_path / "file" / "runs")}})
    assert len(err.splitlines()) == 1 and "MLflowLogger" in err and "the training continues" in err
    assert len([r for r in history(tmp_path / "run") if r["kind"] == "train"]) == 6


def test_a_server_of_mlflow_that_is_gone_does_not_end_the_training(logged, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    err = logged({"MLflowLogger": {"tracking_uri": "http://me:secret@127.0.0.1:9"}})
    assert len(err.splitlines()) == 1 and "MLflowLogger" in err and "secret" not in err
    assert len([r for r in history(tmp_path / "run") if r["kind"] == "train"]) == 6


def test_trackio_keeps_a_run_on_this_machine(logged, tmp_path, monkeypatch):
    sqlite_storage = pytest.importorskip("trackio.sqlite_storage")
    for name in ("TRACKIO_DIR", "MEDIA_DIR"):
        monkeypatch.setattr(sqlite_storage, name, tmp_path / name, raising=False)
    logger = {"TrackioLogger": {"project": "small"}}
    assert logged(logger, "--max_steps=4") == ""
    assert logged(logger) == ""
    name = json.loads((tmp_path / "run" / "logged_run_TrackioLogger.json").read_text())["run_id"]
    storage = sqlite_storage.SQLiteStorage
    assert storage.get_runs("small") == [name] and name.startswith("run-")
    rows = storage.get_logs("small", name)
    found = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    expected = {r["step"]: r["loss"] for r in history(tmp_path / "run") if r["kind"] == "train"}
    assert found == pytest.approx(expected)
    assert math.isclose(rows[-1]["final/train/loss"], expected[6]) and rows[-1]["status"] == "complete"
    assert storage.get_run_config("small", name)["trainer.init.model.hidden_size"] == 32
