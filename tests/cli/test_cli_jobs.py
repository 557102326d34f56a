"""`headwater jobs`, `csctl` and `headwater fit --submit` as somebody types them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from run_samples import history

from headwater.cli import csctl
from headwater.cli.job_output import COLUMNS, short_time
from headwater.trainer.checkpoint_inspection import complete_checkpoints

NAMES = [f"wsjob-{number:012d}" for number in range(1, 9)]


def processes_of(folder):
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if str(folder) in words and any(word.startswith("headwater.appliance.") for word in words):
            found.append(process)
    return found


@pytest.fixture
def queue_dir(tmp_path, monkeypatch):
    """Yield the folder of a queue, and kill its processes after the test."""
    folder = tmp_path / "queue"
    monkeypatch.setenv("HEADWATER_QUEUE_DIR", str(folder))
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):  # a watcher ends soon after its job
            process.kill()


@pytest.fixture
def control(capsys):
    """Runs a command line of csctl in this process: exit code, stdout and stderr."""

    def run(*words):
        code = csctl.main([str(word) for word in words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def wait_until(condition, seconds=200):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.05)


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_jobs_from_submission_to_end_with_both_commands(headwater, control, queue_dir, tmp_path):
    assert rows(headwater("jobs", "list")[1]) == [list(COLUMNS)]
    options = ("--num_csx", 1, "--job_labels", "team=a", "try=1")
    code, out, err = headwater("jobs", "submit", *options, "--", "sh", "-c", "echo --x; sleep 1000")
    assert (code, out.strip()) == (0, NAMES[0]) and "log:" in err
    wait_until(lambda: "--x" in headwater("jobs", "logs", NAMES[0])[1])
    model_dir = tmp_path / "run"
    submit = ("jobs", "submit", "--model_dir", model_dir, "--job_priority", "p3")
    assert headwater(*submit, "--", "true")[1].strip() == NAMES[1]
    assert headwater("jobs", "wait", NAMES[1]) == (0, f"{NAMES[1]} is SUCCEEDED\n", "")
    assert headwater(*submit, "--", "sh", "-c", "exit 7")[0] == 0
    code, out, _ = headwater("jobs", "wait", NAMES[2])
    assert (code, out) == (1, f"{NAMES[2]} is FAILED: ended with exit code 7\n")

    code, out, _ = control("get", "jobs")
    head, job = rows(out)
    assert head == ["NAME", "AGE", "DURATION", "PHASE", "SYSTEMS", "PRIORITY", "USER", "LABELS"]
    assert (job[0], *job[3:6], job[7]) == (NAMES[0], "RUNNING", "csx-0", "p2", "team=a,try=1")
    _, out, _ = control("get", "jobs", "-a")
    assert [row[0] for row in rows(out)[1:]] == NAMES[:3]
    assert [row[3] for row in rows(out)[1:]] == ["RUNNING", "SUCCEEDED", "FAILED"]
    assert rows(out)[0] == [*COLUMNS, "REASON"] and "ended with exit code 7" in out
    ours, theirs = (control("get", "jobs", "-a", "-o", style)[1] for style in ("json", "yaml"))
    assert json.loads(ours) == yaml.safe_load(theirs)
    one, same = (control("get", "job", "3", "-o", style)[1] for style in ("json", "yaml"))
    assert json.loads(one) == yaml.safe_load(same) == json.loads(ours)[2]
    assert rows(control("get", "job", NAMES[2])[1])[1][0] == NAMES[2]
    assert json.loads(ours)[2]["reason"] == "ended with exit code 7"
    assert json.loads(ours)[2]["log"] == str(model_dir / f"{NAMES[2]}.log")
    assert yaml.safe_load(headwater("jobs", "show", NAMES[1])[1]) == json.loads(ours)[1]

    assert control("label", "job", NAMES[0], "team-", "who=me")[1] == f"{NAMES[0]} has try=1, who=me\n"
    assert headwater("jobs", "label", NAMES[0], "try-", "who-")[1] == f"{NAMES[0]} has no labels\n"
    whole_machine = len(os.sched_getaffinity(0))  # the first job has a part of it, so this one waits
    headwater("jobs", "submit", "--num_csx", whole_machine, "--", "true")
    assert control("job", "set-priority", NAMES[3], "p1")[1] == f"{NAMES[3]} has priority p1\n"
    assert headwater("jobs", "priority", NAMES[3], "p3")[1] == f"{NAMES[3]} has priority p3\n"
    out = control("cancel", "job", NAMES[3])[1]
    assert out.startswith(f"{NAMES[3]} is CANCELLED: cancelled by ") and "before it ran" in out
    assert "was asked to end" in control("cancel", "job", NAMES[0])[1]
    assert "SIGTERM" in headwater("jobs", "wait", NAMES[0])[1]


def test_a_failed_job_shows_its_last_error(headwater, control, queue_dir):
    script = "echo start; yes | head -n 40000; echo 'error: the disk is full' >&2; echo '  remedy: x'; exit 1"
    headwater("jobs", "submit", "--", "sh", "-c", script)
    headwater("jobs", "wait", "1")
    found = yaml.safe_load(headwater("jobs", "show", "1")[1])
    assert (found["reason"], found["last_error"]) == ("ended with exit code 1", "error: the disk is full")
    assert yaml.safe_load(control("get", "job", "1", "-o", "yaml")[1]) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "pods"), "unknown resource 'pods'\n  where: command line\n  remedy: available: jobs"),
        (("get", "jbs"), "did you mean jobs?"),
        (("cancel", "node", NAMES[0]), "unknown resource 'node'"),
        (("cancel", "job", NAMES[0]), "there is no job"),
        (("label", "job", NAMES[0], "x"), "expected a label name=value, got 'x'"),
        (("label", "job", NAMES[0], "a.b=1"), "expected a label name=value, got 'a.b=1'"),
        (("job", "set-priority", NAMES[0], "p9"), "unknown priority 'p9'\n  where: priority of the job"),
        (("get", "jobs", "-o", "xml"), "yaml, got 'xml'"),
        (("get", "jobs", "--queue", "cloud"), "unknown queue 'cloud'"),
        (("get",), "RESOURCE"),
        ((), "COMMAND"),
    ],
)
def test_bad_input_of_csctl(control, queue_dir, words, message):
    code, _, err = control(*words)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("submit",), "the command of the job is missing"),
        (("submit", "true"), "unexpected argument 'true'"),
        (("submit", "--num_csx", "0", "--", "true"), "got 0"),
        (("submit", "--num_csx", "4096", "--", "true"), "got 4096"),
        (("submit", "--model_dir", "", "--", "true"), "--model_dir: expected a path, got an empty text"),
        (("submit", "--job_labels", "x", "--", "true"), "expected a label name=value, got 'x'"),
        (("submit", "--job_priority", "high", "--", "true"), "unknown priority 'high'"),
        (("list", "--", "true"), "unexpected argument 'true'"),
        (("serve", "--num_csx", "0"), "expected --num_csx >= 1, got 0"),
        (("serve", "--grace", "-1"), "expected --grace >= 0, got -1"),
        (("serve", "--grace", "nan"), "expected --grace >= 0, got nan"),
        (("lst",), "did you mean list?"),
    ],
)
def test_bad_input_of_jobs(headwater, queue_dir, words, message):
    code, _, err = headwater("jobs", *words)
    assert code == 2 and message in err


def test_a_supervisor_in_the_foreground(headwater, queue_dir):
    command = [sys.executable, "-m", "headwater", "jobs", "serve", "--num_csx", "3", "--grace", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert str(queue_dir) in process.stdout.readline()
        headwater("jobs", "submit", "--num_csx", 3, "--", "sleep", "1000")
        wait_until(lambda: "RUNNING" in headwater("jobs", "list")[1])
        code, _, err = headwater("jobs", "serve")
        assert code == 2 and "another supervisor" in err
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0 and "running jobs continue" in out
    assert "csx-0,csx-1,csx-2" in headwater("jobs", "list")[1]
    headwater("jobs", "cancel", NAMES[0])
    assert headwater("jobs", "wait", NAMES[0])[0] == 1


def test_a_submitted_run_can_be_watched_cancelled_and_resumed(headwater, queue_dir, params, tmp_path):
    run = tmp_path / "run"
    endless = ("--max_steps", 1_000_000, "--eval_frequency", 0, "--checkpoint_steps", 1_000_000)
    labels = ("--job_labels", "kind=test", "team=a", "--job_priority", "p1")
    code, out, err = headwater("fit", params, *endless, "--submit", *labels)
    assert code == 0 and out.strip() == NAMES[0], err
    (job,) = json.loads(headwater("jobs", "list", "-o", "json")[1])
    assert job["labels"] == {"kind": "test", "team": "a"}
    assert (job["priority"], job["num_csx"], job["model_dir"]) == ("p1", 1, str(run))
    code, _, err = headwater("fit", params, "--submit")
    assert code == 2 and "uses this model_dir" in err

    wait_until(lambda: len(history(run)) >= 3 if (run / "history.jsonl").exists() else False)
    frame = headwater("jobs", "top", "--once")[1]
    assert "CSXs: 1 of" in frame and "tokens/s" in frame and NAMES[0] in frame
    headwater("jobs", "cancel", NAMES[0])
    code, out, _ = headwater("jobs", "wait", NAMES[0])
    assert code == 1 and "CANCELLED: cancelled; ended with exit code 130" in out
    text = headwater("jobs", "logs", NAMES[0])[1]
    assert text == (run / f"{NAMES[0]}.log").read_text() and "stopping after this step" in text
    last = len(history(run))
    assert complete_checkpoints(run) == [run / f"checkpoint_{last}"]

    assert headwater("fit", run, "--max_steps", last + 2, "--submit")[0] == 0
    assert headwater("jobs", "wait", NAMES[1])[0] == 0, headwater("jobs", "logs", NAMES[1])[1]
    text = headwater("jobs", "logs", NAMES[1])[1]
    assert f"continuing from step {last}" in text and f"job {NAMES[1]} of the queue" in text
    assert len(history(run)) == last + 2


def test_errors_in_params_are_reported_at_submission(headwater, queue_dir, params):
    for words, message in (
        (("--num_csx", 4096), "got 4096"),
        (("--job_labels", "x"), "expected a label name=value, got 'x'"),
        (("--job_priority", "p9"), "p9"),
        (("--max_steps", "many"), "many"),
    ):
        code, _, err = headwater("fit", params, "--submit", *words)
        assert code == 2 and message in err
    code, out, _ = headwater("jobs", "list", "--all")
    assert len(out.splitlines()) == 1


def test_durations_are_short():
    assert [short_time(s) for s in (0, 119, 120, 10799, 10800, 43 * 3600, 48 * 3600)] == [
        "0s", "119s", "2m", "179m", "3h", "43h", "2d"
    ]  # fmt: skip


def test_job_options_without_submit_get_a_notice(headwater, params):
    code, _, err = headwater("fit", params, "--validate_only", "--job_priority", "p1")
    assert code == 0 and "note: job_priority has no effect without --submit" in err


@pytest.mark.real_start
def test_listing_jobs_does_not_import_torch(queue_dir):
    program = (
        "import sys\n"
        "from headwater.cli import csctl, main\n"
        "assert main.main(['jobs', 'list']) == csctl.main(['get', 'jobs']) == 0\n"
        "assert csctl.main(['get', 'pods']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
