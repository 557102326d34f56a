"""The embedded queue with real processes: how jobs end, and that each is started once whatever is killed."""

import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from queue_samples import assert_cannot_be_changed, end, job_processes, processes_of, wait_until

from headwater.appliance.database import Database
from headwater.appliance.folder import QueueFolder, is_locked
from headwater.appliance.job_processes import kill_processes
from headwater.appliance.supervisor import ensure_supervisor
from headwater.appliance.types import Phase, Priority, Submission
from headwater.core.errors import ConfigError, QueueError

LONG = ("sleep", "1000")


def running(queue, job):
    """The job, once its process runs."""
    return wait_until(lambda: (found := queue.show(job.name)).phase == Phase.RUNNING and found)


@pytest.mark.parametrize(
    ("command", "phase", "reason", "exit_code"),
    [
        (("true",), Phase.SUCCEEDED, None, 0),
        (("sh", "-c", "exit 3"), Phase.FAILED, "ended with exit code 3", 3),
        (("sh", "-c", "kill -SEGV $$"), Phase.FAILED, "ended by SIGSEGV", -11),
        (("no-such-program",), Phase.FAILED, "no-such-program: No such file or directory", 127),
        ((os.fsdecode(b"\xff-program"),), Phase.FAILED, "-program: No such file or directory", 127),
    ],
)
def test_how_jobs_end(submit, queue, command, phase, reason, exit_code):
    job = queue.wait(submit(*command).name, 120)
    assert (job.phase, job.exit_code) == (phase, exit_code)
    assert (reason is None and job.reason is None) or reason in job.reason
    assert job.reason is None or "\n" not in job.reason, "a list of jobs has a row for each job"
    assert job.created <= job.started <= job.ended
    assert len(job.systems) == 1


def test_a_job_has_its_folder_environment_cores_and_log(submit, queue, tmp_path):
    program = (
        "import os; mask = os.umask(0); os.umask(mask); print(os.getcwd(), oct(mask), os.environ['COLOUR'])\n"
        "print(os.environ['HEADWATER_CSX'], sorted(os.sched_getaffinity(0)))\n"
        "open('made', 'w'); os.write(2, b'oh')"
    )
    environment = {"PATH": os.environ["PATH"], "COLOUR": "green", "HEADWATER_CSX": "7"}
    command = (sys.executable, "-u", "-c", program)
    work = tmp_path / "work"
    job = submit(*command, environment=environment, model_dir=work, num_csx=2, umask=0o027)
    text = "".join(queue.logs(job.name, follow=True))
    assert job.log == work / f"{job.name}.log" and text == job.log.read_text()
    cores = sorted({core for slot in queue._database.slots()[:2] for core in slot.cores})
    lines = [f"job {job.name} on csx-0, csx-1", f"{tmp_path} 0o27 green", f"0,1 {cores}", "oh"]
    assert text.splitlines() == lines
    assert (job.log.stat().st_mode & 0o777, (tmp_path / "made").stat().st_mode & 0o777) == (0o640, 0o640)
    assert "green" not in json.dumps(queue.show(job.name).to_record()), "the environment is the job's alone"


def test_a_log_that_cannot_be_written_is_the_reason(submit, queue, tmp_path):
    (tmp_path / "file").touch()
    job = queue.wait(submit("true", model_dir=tmp_path / "file").name, 120)
    assert job.phase == Phase.FAILED and str(tmp_path / "file") in job.reason


def test_jobs_wait_for_csxs_by_priority_and_age(submit, queue, tmp_path):
    def note(name):
        return "sh", "-c", f"echo {name} >> order"

    first = submit("sh", "-c", "while [ ! -e go ]; do sleep 0.02; done", num_csx=4)
    running(queue, first)
    jobs = [submit(*note("old"), num_csx=4), submit(*note("young"), num_csx=4)]
    jobs.append(submit(*note("urgent"), num_csx=4, priority=Priority.P1))
    jobs.append(submit(*note("changed"), num_csx=4, priority=Priority.P3))
    assert {queue.show(job.name).phase for job in jobs} <= {Phase.CREATED, Phase.QUEUED}
    assert queue.set_priority(jobs[-1].name, Priority.P1).priority == Priority.P1
    (tmp_path / "go").touch()
    assert [queue.wait(job.name, 60).phase for job in jobs] == [Phase.SUCCEEDED] * 4
    assert (tmp_path / "order").read_text().split() == ["urgent", "changed", "old", "young"]


def test_labels_and_lists(submit, queue):
    job = submit("true", labels={"team": "a"})
    other = submit(*LONG)
    assert queue.label(other.name, {"team": "b", "try": "1"}).labels == {"team": "b", "try": "1"}
    assert queue.label(other.name, {"try": None}).labels == {"team": "b"}
    with pytest.raises(QueueError, match="no label 'try'"):
        queue.label(other.name, {"try": None})
    queue.wait(job.name, 120)
    assert [one.name for one in queue.jobs()] == [other.name]
    assert [one.name for one in queue.jobs(everything=True)] == [job.name, other.name]


def test_invalid_requests_are_refused(submit, queue, tmp_path):
    with pytest.raises(ConfigError, match=r"expected num_csx to be 1 to 4 \(CSXs of the queue\), got 5"):
        submit("true", num_csx=5)
    with pytest.raises(ConfigError, match="command of the job is empty"):
        submit()
    with pytest.raises(ConfigError, match="expected a label"):
        submit("true", labels={"a b": "c"})
    first = running(queue, submit(*LONG, model_dir=tmp_path / "run"))
    with pytest.raises(QueueError, match=f"{first.name} \\(RUNNING\\) uses this model_dir"):
        submit("true", model_dir=tmp_path / "run")
    with pytest.raises(QueueError, match="cannot change: it is RUNNING"):
        queue.set_priority(first.name, Priority.P1)
    for name in ("wsjob-000000000099", "nonsense"):
        with pytest.raises(QueueError, match="there is no job"):
            queue.show(name)
    assert_cannot_be_changed(queue, queue.wait(submit("true").name, 120))
    with pytest.raises(QueueError, match="still RUNNING"):
        queue.wait(first.name, 0.01)
    queue.cancel(first.name)
    queue.wait(first.name, 120)
    assert queue.wait(submit("true", model_dir=tmp_path / "run").name, 120).phase == Phase.SUCCEEDED


def test_a_cancelled_job_is_asked_first(submit, queue, tmp_path):
    polite = submit(
        "sh", "-c", "trap 'echo saved > saved; exit 5' TERM; touch up; while :; do sleep 0.02; done"
    )
    wait_until((tmp_path / "up").exists)
    assert queue.cancel(polite.name).phase == Phase.RUNNING
    job = queue.wait(polite.name, 120)
    assert (job.phase, job.exit_code) == (Phase.CANCELLED, 5) and "exit code 5" in job.reason
    assert (tmp_path / "saved").exists()


def test_cancelling_twice_ends_a_job_at_once(submit, queue, tmp_path):
    deaf = submit("sh", "-c", "trap '' TERM; touch up; while :; do sleep 0.02; done")
    wait_until((tmp_path / "up").exists)
    queue.cancel(deaf.name)
    time.sleep(0.7)  # it has been asked
    assert queue.show(deaf.name).phase == Phase.RUNNING
    queue.cancel(deaf.name)
    job = queue.wait(deaf.name, 120)  # less than the grace
    assert (job.phase, job.exit_code) == (Phase.CANCELLED, -9)


def test_a_job_that_does_not_end_in_time_is_ended(submit, queue, folder, tmp_path):
    database = Database(folder)
    database.change_settings(None, 0.2)
    database.close()
    deaf = submit("sh", "-c", "trap '' TERM; touch up; while :; do sleep 0.02; done")
    wait_until((tmp_path / "up").exists)
    queue.cancel(deaf.name)
    assert queue.wait(deaf.name, 120).exit_code == -9


def test_a_job_that_waits_is_cancelled_without_having_run(submit, queue, tmp_path):
    first = running(queue, submit(*LONG, num_csx=4))
    waiting = submit("touch", "ran")
    job = queue.cancel(waiting.name)
    assert job.phase == Phase.CANCELLED and job.started is None and "before it ran" in job.reason
    queue.cancel(first.name)
    queue.wait(first.name, 120)
    assert not (tmp_path / "ran").exists()


def test_nothing_of_a_job_is_left_when_it_is_over(submit, queue, folder):
    """Not even what has left its session, as ranks of a launcher do."""
    job = submit("sh", "-c", "setsid sleep 1000 & setsid sh -c 'sleep 1000 & sleep 1000' & sleep 0.2")
    assert queue.wait(job.name, 120).phase == Phase.SUCCEEDED
    assert job_processes(folder) == []


def test_a_job_continues_without_a_supervisor(submit, queue, supervisor, folder, tmp_path):
    job = submit("sh", "-c", "echo start >> starts; while [ ! -e go ]; do sleep 0.02; done; exit 4")
    other = submit("sh", "-c", "echo start >> others; while [ ! -e end ]; do sleep 0.02; done")
    running(queue, job), running(queue, other)
    end([supervisor()])
    (tmp_path / "go").touch()
    database = Database(folder)  # opening it in this way starts no supervisor
    query = "SELECT phase, exit_code FROM jobs WHERE id = 1"
    wait_until(lambda: tuple(database.rows(query)[0]) == (Phase.FAILED, 4))
    assert [row["job"] for row in database.rows("SELECT job FROM leases")] == [2]
    ensure_supervisor(folder)
    third = submit("true", num_csx=3)  # the CSX of the other job is not given away
    assert queue.wait(third.name, 120).systems == ("csx-0", "csx-2", "csx-3")
    assert queue.show(other.name).phase == Phase.RUNNING
    (tmp_path / "end").touch()
    assert queue.wait(other.name, 120).phase == Phase.SUCCEEDED
    database.close()
    assert (tmp_path / "starts").read_text() == (tmp_path / "others").read_text() == "start\n"


def test_the_next_supervisor_starts_jobs_of_a_killed_one(submit, queue, supervisor, folder, tmp_path):
    running(queue, submit(*LONG, num_csx=4))
    job = submit("sh", "-c", "echo start >> starts")
    wait_until(lambda: queue.show(job.name).phase == Phase.QUEUED)
    end([supervisor()])
    database = Database(folder)
    with database.transaction():  # what a supervisor records before it starts anything
        database.execute("DELETE FROM leases")
        database.execute("INSERT INTO leases VALUES (2, 2)")
        database.execute("UPDATE jobs SET phase = ?, slots = '[2]' WHERE id = 2", (Phase.INITIALIZING,))
    database.close()
    assert queue.wait(job.name, 120).systems == ("csx-2",)
    assert (tmp_path / "starts").read_text() == "start\n"


def test_concurrent_watchers_start_a_job_only_once(submit, queue, supervisor, folder, tmp_path):
    blocker = running(queue, submit(*LONG, num_csx=4))
    job = submit("sh", "-c", "echo start >> starts; sleep 0.3")
    end([supervisor()])
    database = Database(folder)
    database.execute("UPDATE jobs SET phase = ?, slots = '[0]' WHERE id = 2", (Phase.INITIALIZING,))
    database.close()
    command = [sys.executable, "-m", "headwater.appliance.watcher", str(folder.path), "2"]
    watchers = [subprocess.Popen(command) for _ in range(5)]
    assert [watcher.wait(60) for watcher in watchers] == [0] * 5
    assert queue.show(job.name).phase == Phase.SUCCEEDED
    assert (tmp_path / "starts").read_text() == "start\n"
    queue.cancel(blocker.name)


def test_a_job_without_a_watcher_has_failed(submit, queue, supervisor, folder, tmp_path):
    job = submit("sh", "-c", "setsid sleep 1000 & touch up; sleep 1000", num_csx=4)
    wait_until((tmp_path / "up").exists)
    end([supervisor(), *processes_of(folder, "watcher")])
    failed = queue.wait(job.name, 120)
    assert failed.phase == Phase.FAILED and "watcher process was killed" in failed.reason
    assert job_processes(folder) == [], "its CSXs would be used twice"
    assert queue.wait(submit("true", num_csx=4).name, 120).phase == Phase.SUCCEEDED


@pytest.fixture
def start(folder):
    """Starts a process as one of job 1."""
    started = []

    def run(*command):
        variables = {"HEADWATER_JOB": "wsjob-000000000001", "HEADWATER_QUEUE_DIR": str(folder.path)}
        started.append(subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_processes_that_start_while_others_are_killed_are_killed_too(start, folder, monkeypatch):
    """Each pass over the processes misses one that starts at its end, three times."""
    first, late, process_iter = start(*LONG), [], psutil.process_iter

    def iterate():
        yield from process_iter()
        if len(late) < 3:
            late.append(start(*LONG))

    monkeypatch.setattr(psutil, "process_iter", iterate)
    assert kill_processes(folder.path, "wsjob-000000000001")
    assert [process.wait(100) for process in [first, *late]] == [-9] * 4


def test_a_process_that_is_replacing_its_program_is_looked_at_again(start, folder, monkeypatch):
    process, hidden, environ = start(*LONG), [], psutil.Process.environ

    def hide(self):
        if self.pid != process.pid or len(hidden) == 3:
            return environ(self)
        hidden.append(self.pid)  # as in the middle of `execve`
        return {}

    monkeypatch.setattr(psutil.Process, "environ", hide)
    module = "headwater.appliance.job_processes"
    monkeypatch.setattr(f"{module}._is_replacing_its_program", lambda pid: pid == process.pid)
    assert kill_processes(folder.path, "wsjob-000000000001")
    assert process.wait(100) == -9


def test_processes_of_jobs_of_other_queues_are_not_killed(start, folder):
    process = start(*LONG)
    assert kill_processes(folder.path / "other", "wsjob-000000000001")
    assert kill_processes(folder.path, "wsjob-000000000002")
    assert process.poll() is None


def test_one_supervisor_at_a_time_and_unique_leases(folder, queue, supervisor, submit):
    running(queue, submit(*LONG))
    supervisor()
    command = [sys.executable, "-m", "headwater.appliance.supervisor", str(folder.path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and "another supervisor" in second.stderr
    database = Database(folder)
    with pytest.raises(QueueError, match="UNIQUE"):
        database.execute("INSERT INTO leases VALUES (0, 1)")
    database.close()


def test_a_supervisor_ends_when_the_folder_of_its_queue_is_removed(folder):
    command = [sys.executable, "-m", "headwater", "jobs", "serve", "--queue_dir", str(folder.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served:
        wait_until(lambda: is_locked(folder.supervisor_lock) and folder.job_locks.exists())
        shutil.rmtree(folder.path)
        _, error = served.communicate(timeout=30)
    assert served.returncode == 2 and "Traceback" not in error
    assert "the folder of the queue was removed" in error and str(folder.path) in error


def test_a_command_that_waits_ends_when_the_folder_of_the_queue_is_removed(submit, queue, folder):
    job = running(queue, submit(*LONG))
    shutil.rmtree(folder.path)
    with pytest.raises(QueueError, match="the folder of the queue was removed") as removed:
        queue.wait(job.name)
    assert removed.value.where == str(folder.path)


def test_jobs_for_more_csxs_than_there_still_are_fail(submit, queue, supervisor, folder):
    running(queue, submit(*LONG, num_csx=4))
    job = submit("true", num_csx=4)
    database = Database(folder)
    database.change_settings(database.slots()[:2], None)
    database.close()
    assert queue.wait(job.name, 120).reason == "expected num_csx to be 1 to 2 (CSXs of the machine), got 4"


def test_a_submission_that_is_sent_twice_creates_one_job(queue, submit, tmp_path):
    submission = Submission(("true",), tmp_path, model_dir=tmp_path / "run")
    assert queue.submit(submission, "same").name == queue.submit(submission, "same").name
    assert len(queue.jobs(everything=True)) == 1


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(QueueError, match="other users can write"):
        QueueFolder(tmp_path / "open").create()


def test_a_file_that_is_not_a_database_is_an_error(folder):
    folder.database.write_text("not a database, but long enough to be taken for one" * 20)
    with pytest.raises(QueueError, match="not a database"):
        Database(folder)


@pytest.mark.parametrize("size", [1, 5000], ids=["small", "several pages"])
def test_the_environment_of_a_job_that_is_over_is_in_no_file_of_the_queue(
    submit, queue, supervisor, folder, size
):
    supervisor()  # it and the test keep connections: the log of the database stays
    secret = "open sesame " * size
    name = submit("true", environment={**os.environ, "SECRET": secret}).name
    assert queue.wait(name, 120).phase == Phase.SUCCEEDED
    waiting = submit("true", environment={"SECRET": secret}, num_csx=4).name
    queue.cancel(waiting)
    queue.wait(waiting, 120)

    def left():
        return {path.name: b"open sesame" in path.read_bytes() for path in folder.path.glob("queue.sqlite*")}

    assert left().keys() >= {"queue.sqlite", "queue.sqlite-wal"}
    wait_until(lambda: not any(left().values()))  # a moment after the end of a job


def test_the_log_of_the_supervisor_is_private(submit, queue, supervisor, folder):
    folder.supervisor_log.touch(mode=0o644)
    folder.supervisor_log.chmod(0o644)
    queue.wait(submit("true").name, 120)
    assert folder.supervisor_log.stat().st_mode & 0o777 == 0o600


def test_a_job_that_a_signal_without_a_name_ends(queue, submit):
    job = queue.wait(submit("sh", "-c", "kill -40 $$").name, 60)
    assert (job.phase, job.exit_code, job.reason) == (Phase.FAILED, -40, "ended by signal 40")
