"""Ranks from the environment of `srun` tasks. The variables are those that Slurm 22.05 sets."""

import pytest

from headwater.fabric import slurm

TASK = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-006,011]",
}


def test_all_tasks_of_a_slurm_step_compute_the_same_address_of_rank_0():
    assert slurm.is_task(TASK)
    rank = slurm.as_rank(TASK)
    assert (rank["RANK"], rank["WORLD_SIZE"], rank["LOCAL_RANK"], rank["GROUP_RANK"]) == ("5", "8", "1", "1")
    assert rank["MASTER_ADDR"] == "gpu003"
    other = slurm.as_rank({**TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert other["MASTER_PORT"] == rank["MASTER_PORT"]
    assert slurm.as_rank({**TASK, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != rank["MASTER_PORT"]
    assert slurm.as_rank({**TASK, "MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


def test_processes_that_are_not_slurm_tasks_are_not_ranks():
    assert not slurm.is_task({})
    assert not slurm.is_task({**TASK, "SLURM_STEP_NUM_TASKS": "1"})
    assert not slurm.is_task({**TASK, "RANK": "0"})  # torchrun under srun
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    assert not slurm.is_task({**batch, "SLURM_NTASKS": "8"})  # the script itself


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("box", "box"),
        ("a1,a2", "a1"),
        ("gpu[07-09],b", "gpu07"),
        ("n[3,5].local", "n3.local"),
        ("n-1[2]", "n-12"),
    ],
)
def test_the_first_host_of_a_list_is_found(hosts, first):
    assert slurm.first_host(hosts) == first
