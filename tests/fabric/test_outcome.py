"""The choice of the cause among several failed ranks."""

import signal

import pytest

from headwater.core.errors import DataError, RankError
from headwater.fabric.launch.outcome import Failure, exit_code

MISSED = {"kind": "RankError", "what": "rank 1 is gone", "where": None, "remedy": None}
DATA = {"kind": "DataError", "what": "a file is damaged", "where": "x.h5", "remedy": None}


def failure(rank, code, told=None, time_s=0.0, was_killed=False):
    return Failure(rank, f"process {100 + rank}", code, told or {}, time_s, was_killed)


def test_the_cause_is_chosen_before_timeouts_of_other_hosts_with_any_clocks():
    early = {**MISSED, "time_s": 5.0}
    with pytest.raises(DataError, match="a file is damaged"):
        exit_code([failure(0, 1, early), failure(1, 1, {**DATA, "time_s": 9.0})])
    with pytest.raises(RankError, match=r"rank 1 \(process 101\) was ended by SIGKILL"):
        exit_code([failure(0, 1, early), failure(1, -signal.SIGKILL, time_s=9.0)])
    with pytest.raises(RankError, match=r"rank 1 \(process 101\) is gone"):
        exit_code([failure(0, 1, early), failure(1, None, time_s=9.0)])


def test_ranks_that_the_launcher_ended_are_not_the_cause():
    ended = failure(0, -signal.SIGTERM)
    with pytest.raises(RankError, match="rank 1 is gone"):
        exit_code([ended, failure(2, 1, {**MISSED, "time_s": 3.0})])
    assert exit_code([ended], passed_on=[signal.SIGTERM]) == 143
    with pytest.raises(RankError, match="was ended by SIGTERM"):
        exit_code([ended])


def test_a_rank_that_the_launcher_had_to_kill_is_not_the_cause(capsys):
    killed = failure(1, -signal.SIGKILL, time_s=1.0, was_killed=True)
    with pytest.raises(RankError, match="rank 1 is gone"):
        exit_code([killed, failure(0, 1, {**MISSED, "time_s": 3.0})])
    assert capsys.readouterr().err == "rank 1 (process 101) did not end and was killed\n"
    with pytest.raises(RankError, match=r"rank 1 .* was ended by SIGKILL"):
        exit_code([failure(1, -signal.SIGKILL), failure(0, 1, {**MISSED, "time_s": 3.0})])
    with pytest.raises(DataError):
        exit_code([failure(1, -signal.SIGKILL, DATA, was_killed=True), failure(0, 1, MISSED)])


def test_after_a_signal_only_a_real_failure_is_reported():
    stopped = failure(0, -signal.SIGTERM)
    missed = failure(1, 1, {**MISSED, "time_s": 3.0})
    assert exit_code([missed, stopped], passed_on=[signal.SIGTERM]) == 143
    with pytest.raises(DataError):
        exit_code([missed, stopped, failure(2, 1, {**DATA, "time_s": 4.0})], passed_on=[signal.SIGTERM])


def test_the_first_of_two_errors_is_the_cause():
    with pytest.raises(DataError, match="first"):
        exit_code([
            failure(0, 1, {**DATA, "what": "second", "time_s": 2.0}),
            failure(1, 1, {**DATA, "what": "first", "time_s": 1.0}),
        ])  # fmt: skip


def test_an_error_that_a_rank_printed_is_not_printed_again(capsys):
    assert exit_code([failure(0, 130)]) == 130
    assert exit_code([failure(0, 1)]) == 1  # rank 0 has printed why
    with pytest.raises(RankError, match=r"rank 3 \(process 103\) ended with exit code 1"):
        exit_code([failure(3, 1)])
    assert exit_code([failure(2, 1, {"traceback": "Traceback …\n", "time_s": 0.0})]) == 1
    assert capsys.readouterr().err == "rank 2 has failed:\nTraceback …\n"
