"""Many jobs from several processes while the supervisor is killed: the small form of the benchmark."""

from benchmarks.job_queue import check, run
from queue_samples import end, processes_of

from headwater.appliance.folder import QueueFolder


def test_jobs_run_once_and_csxs_are_not_shared_whatever_is_killed(tmp_path):
    try:
        outcome = run(tmp_path, jobs=40, submitters=2, kills=4)
    finally:
        end(processes_of(QueueFolder(tmp_path / "queue"), "supervisor"))
    assert outcome.problems == []
    assert outcome.kills >= 4
    assert (outcome.succeeded, outcome.failed) == (36, 4)


def test_the_check_finds_shared_csxs():
    records = ["start a 0", "start b 0,1", "end a", "start c 0"]
    assert check([], records) == [f"{pair} had CSX 0 at the same time" for pair in ("b and a", "c and b")]
