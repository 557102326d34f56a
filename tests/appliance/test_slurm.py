"""The queue of a Slurm cluster, against a real controller and a real node on loopback."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from queue_samples import assert_cannot_be_changed

import slurm_cluster
from headwater.appliance.open import open_queue
from headwater.appliance.queue import new_token
from headwater.appliance.types import Phase, Priority, Submission
from headwater.cli import csctl
from headwater.core.errors import ConfigError, QueueError

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a cluster of its own"),
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=f"needs Slurm, and there is no {slurm_cluster.missing()}"
    ),
]


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster.cluster() as configuration:
        yield configuration


@pytest.fixture
def queue(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", cluster)
    monkeypatch.setenv("HEADWATER_QUEUE", "slurm")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return open_queue()


@pytest.fixture
def submit(queue, tmp_path):
    names = []

    def run(*command, **options):
        options.setdefault("environment", dict(os.environ))
        job = queue.submit(Submission(tuple(command), tmp_path, **options), new_token())
        names.append(job.name)
        return job

    yield run
    for name in names:
        if not queue.show(name).phase.over:
            subprocess.run(["scancel", name], check=True)
            queue.wait(name, 120)


def wait_until(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    ("command", "phase", "exit_code", "reason"),
    [
        (("true",), Phase.SUCCEEDED, 0, None),
        (("sh", "-c", "exit 3"), Phase.FAILED, 3, "FAILED; NonZeroExitCode; ended with exit code 3"),
        (("sh", "-c", "kill -KILL $$"), Phase.FAILED, -9, "ended by SIGKILL"),
        (("no-such-program",), Phase.FAILED, 127, "ended with exit code 127"),
    ],
)
def test_how_jobs_end(submit, queue, command, phase, exit_code, reason):
    job = queue.wait(submit(*command).name, 120)
    assert (job.phase, job.exit_code, job.command) == (phase, exit_code, command)
    assert (reason is None and job.reason is None) or reason in job.reason
    assert job.created <= job.started <= job.ended and job.num_csx == 1


def test_a_slurm_job_has_its_folder_environment_and_log(submit, queue, tmp_path):
    program = 'pwd; umask; echo "$COLOUR | $HEADWATER_JOB"; echo oh >&2; printf "%s\n" "a b" "ü"'
    environment = {**os.environ, "COLOUR": "green"}
    model_dir = tmp_path / "a 100% run"
    job = submit("sh", "-c", program, environment=environment, model_dir=model_dir, umask=0o027, num_csx=2)
    lines = "".join(queue.logs(job.name, follow=True)).splitlines()
    assert lines == [str(tmp_path), "0027", f"green | {job.name}", "oh", "a b", "ü"]
    assert queue.show(job.name).log == model_dir / f"{job.name}.log"
    assert queue.show(job.name).num_csx == 2


def test_jobs_wait_for_csxs_by_priority(submit, queue, tmp_path):
    first = submit("sh", "-c", "while [ ! -e go ]; do sleep 0.1; done", num_csx=4)
    wait_until(lambda: queue.show(first.name).phase == Phase.RUNNING)

    def note(name, **options):
        return submit("sh", "-c", f"echo {name} >> order", num_csx=4, **options)

    jobs = [
        note("old"),
        note("young"),
        note("urgent", priority=Priority.P1),
        note("late", priority=Priority.P3),
    ]
    assert {queue.show(job.name).phase for job in jobs} == {Phase.QUEUED}
    assert queue.set_priority(jobs[1].name, Priority.P1).priority == Priority.P1
    with pytest.raises(QueueError, match="cannot change: it is RUNNING"):
        queue.set_priority(first.name, Priority.P1)
    (tmp_path / "go").touch()
    assert [queue.wait(job.name, 60).phase for job in jobs] == [Phase.SUCCEEDED] * 4
    assert (tmp_path / "order").read_text().split() == ["young", "urgent", "old", "late"]


def test_a_cancelled_job_is_asked_first_and_ended_the_second_time(submit, queue, tmp_path):
    wait = "while :; do sleep 0.1; done"
    polite = submit("sh", "-c", f"trap 'echo saved > saved; exit 5' TERM; touch up; {wait}")
    wait_until((tmp_path / "up").exists)
    queue.cancel(polite.name)
    job = queue.wait(polite.name, 120)
    assert (job.phase, job.exit_code, job.reason) == (Phase.CANCELLED, 5, "cancelled; ended with exit code 5")
    assert (tmp_path / "saved").exists()

    deaf = submit("sh", "-c", f"trap '' TERM; touch deaf; {wait}")
    wait_until((tmp_path / "deaf").exists)
    assert queue.cancel(deaf.name).phase == Phase.RUNNING
    time.sleep(1)
    assert queue.show(deaf.name).phase == Phase.RUNNING
    queue.cancel(deaf.name)
    assert queue.wait(deaf.name, 120).phase == Phase.CANCELLED

    blocker = submit("sleep", "1000", num_csx=4)
    waiting = submit("touch", "ran")
    assert queue.wait(queue.cancel(waiting.name).name, 120).phase == Phase.CANCELLED
    queue.cancel(blocker.name)
    queue.wait(blocker.name, 120)
    assert not (tmp_path / "ran").exists()


def test_invalid_requests_are_refused(submit, queue, tmp_path):
    with pytest.raises(ConfigError, match=r"expected num_csx to be 1 to 4 \(CSXs of the cluster\), got 5"):
        submit("true", num_csx=5)
    with pytest.raises(ConfigError, match="the limit is 1000"):
        submit("true", labels={f"label{index}": "x" * 100 for index in range(20)})
    first = submit("sleep", "1000", model_dir=tmp_path / "run")
    with pytest.raises(QueueError, match=f"job {first.name} .* uses this model_dir"):
        submit("true", model_dir=tmp_path / "run")
    plain = subprocess.run(
        ["sbatch", "--parsable", "--wrap=true"], capture_output=True, text=True, cwd=tmp_path
    )
    for name in (plain.stdout.strip(), "999999", "nonsense"):
        with pytest.raises(QueueError, match="there is no job"):
            queue.show(name)
    assert plain.stdout.strip() not in {job.name for job in queue.jobs(everything=True)}
    assert_cannot_be_changed(queue, queue.wait(submit("true").name, 120))


def test_a_submission_that_is_sent_twice_creates_one_job(queue, submit, tmp_path):
    blocker = submit("sleep", "1000", num_csx=4)
    submission = Submission(("true",), tmp_path, dict(os.environ), model_dir=tmp_path / "run")
    name = queue.submit(submission, "same").name
    assert queue.submit(submission, "same").name == name
    queue.cancel(blocker.name)
    assert queue.wait(name, 120).phase == Phase.SUCCEEDED


def test_another_user_cannot_change_a_job(submit, queue):
    job = submit("sleep", "1000")
    program = (
        "import os, sys\n"
        "from headwater.appliance.open import open_queue\n"
        "from headwater.core.errors import QueueError\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "queue = open_queue('slurm')\n"
        "print([job.name for job in queue.jobs()])\n"
        "for change in (lambda: queue.cancel(sys.argv[1]), lambda: queue.label(sys.argv[1], {'a': 'b'})):\n"
        "    try:\n"
        "        change(); print('changed')\n"
        "    except QueueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, job.name], capture_output=True, text=True, cwd="/")
    assert done.stdout.count("where: Slurm's ") == 2 and job.name in done.stdout, done.stdout + done.stderr
    assert queue.show(job.name).phase in (Phase.QUEUED, Phase.RUNNING) and queue.show(job.name).labels == {}


def test_csctl_works_with_slurm(submit, queue, capsys):
    job = submit("sleep", "1000", labels={"team": "a"}, num_csx=3)
    wait_until(lambda: queue.show(job.name).phase == Phase.RUNNING)
    assert csctl.main(["get", "jobs"]) == 0
    row = next(
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(f"{job.name} ")
    )
    node = Path("/proc/sys/kernel/hostname").read_text().strip()
    assert (*row[3:6], row[7]) == ("RUNNING", node, "p2", "team=a")
    assert csctl.main(["label", "job", job.name, "team-", "try=1"]) == 0
    assert csctl.main(["cancel", "job", job.name]) == 0
    assert queue.wait(job.name, 120).phase == Phase.CANCELLED
    capsys.readouterr()
    assert csctl.main(["get", "jobs", "-a", "-o", "json"]) == 0
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == job.name]
    assert (found["phase"], found["labels"], found["num_csx"]) == ("CANCELLED", {"try": "1"}, 3)
