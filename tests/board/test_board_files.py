"""Files of runs that are not as Headwater writes them, and names that are not UTF-8."""

import json
import os
import shutil
import time

import httpx
import pytest
from board_runs import TOKEN, make_run

from headwater.appliance.database import Database
from headwater.appliance.embedded import Caller, EmbeddedQueue
from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.queue import new_token
from headwater.appliance.types import Submission
from headwater.board import files
from headwater.board.jobs import Jobs
from headwater.trainer.run_dir import FACTS_FILE


def ask(address, path, **params):
    """Return the answer of a board as JSON."""
    url = f"{address.partition('#')[0]}api/{path}"
    answer = httpx.get(url, params=params, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()


FOREIGN = {"start_step": 0, "end_step": 30, "started": 0.0, "device": "cpu"}


@pytest.mark.parametrize(
    "changes",
    [
        {"end_step": "soon"},
        {"end_step": None},
        {"end_step": 1.5},
        {"memory_planned": float("nan")},
        {"memory_budget": 10**400},
        {"device": []},
    ],
)
def test_a_run_json_of_another_program_leaves_all_runs_visible(serve, tmp_path, changes):
    run = make_run(tmp_path, "run", 20)
    make_run(tmp_path, "other", 20)
    (run.path / FACTS_FILE).write_text(json.dumps({**FOREIGN, **changes}))
    rows = {row["name"]: row for row in ask(serve(), "state")["runs"]}
    assert rows["other"]["end_step"] == 20
    assert rows["run"]["step"] == 20
    assert rows["run"]["end_step"] is None


def test_names_and_commands_that_are_not_utf8_are_shown(serve, tmp_path):
    text = os.fsdecode(b"\xff\xfe")
    make_run(tmp_path / "runs", f"run{text}", 20)
    folder = QueueFolder(tmp_path / "queue")
    prepare(folder, num_csx=1)
    database = Database(folder)
    queue = EmbeddedQueue(database, Caller.myself(), lambda: None)  # no supervisor: the job waits
    queue.submit(Submission(("echo", text), tmp_path), new_token())
    database.close()
    jobs = Jobs(lambda: EmbeddedQueue(Database(folder), Caller.myself(), lambda: None))
    state = ask(serve(tmp_path / "runs", jobs), "state")
    assert [row["name"] for row in state["runs"]] == [f"run{text}"]
    assert [row["command"] for row in state["jobs"]["rows"]] == [f"echo {text}"]


def test_details_of_a_run_whose_files_vanish_are_answered(tmp_path, monkeypatch):
    run = make_run(tmp_path, "run", 20)
    for name in ("old.log", "new.log", "samples_1.json"):
        (run.path / name).write_text("[]")
        time.sleep(0.01)
    found = files.is_file

    def vanishing(path):
        """Delete a file as soon as it was found."""
        is_there = found(path)
        if path.name in ("old.log", "samples_1.json"):
            path.unlink(missing_ok=True)
        return is_there

    monkeypatch.setattr(files, "is_file", vanishing)
    assert files.logs(run) == ["new.log"]
    assert files.samples(run) == []
    shutil.rmtree(run.path)
    assert files.logs(run) == []
    assert files.timeline(run) is None
