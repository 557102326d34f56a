"""A rank is killed while stages are updated in the backward; the run then resumes to the same bits."""

import dataclasses
import functools
import os
import signal

import pytest
import torch
from harness import FP32, SEED, Job
from rank_training import Net, loss_of, plan_of, tokens
from tests.rank_processes import errors_beside, run_ranks

from headwater.store.gradients.storage import PooledStorage
from headwater.store.rank_backward import RankBackwardUpdates
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.stages import StageAccess
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.pretrained import checkpoint_weights

STEPS = 4


def train(fabric, plan, model_dir, kill=None):
    """Train from the last checkpoint to the last step, and write a checkpoint after each step.

    Args:
        fabric: the ranks.
        plan: the plan.
        model_dir: the folder of the checkpoints.
        kill: a rank, a class and the name of a method. The rank ends itself when it calls this method in the
            backward of the third step.
    """
    first, step, is_late = 0, 0, False

    def killed_in(method):
        def ending(*arguments):
            if is_late:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments)

        return ending

    work = Job(Net, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None)
    model = work.model()

    def note(gradient):
        nonlocal is_late
        is_late = step == 2

    model.blocks[3].register_full_backward_hook(lambda *arguments: note(arguments))
    if kill is not None and kill[0] == fabric.rank:
        setattr(kill[1], kill[2], killed_in(getattr(kill[1], kill[2])))
    checkpoints = CheckpointManager(model_dir)
    with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
        latest = checkpoints.latest()
        if latest is not None:
            saved = SavedCheckpoint(latest)
            saved.restore(engine.store)
            first = saved.manifest.step
        for step in range(first, STEPS):
            engine.train_step(work.batches(step), work.update(step))
            checkpoints.wait()
            engine.store.flush()
            engine.store.scalars.share()
            if fabric.rank == 0:
                checkpoints.save(engine.store, step + 1, {})
            else:
                checkpoints.save_elsewhere(engine.store)
        checkpoints.wait()
        fabric.barrier("the last checkpoint")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights after a run to which nothing happens. Where its weights are changes no bit."""
    folder = tmp_path_factory.mktemp("undisturbed")
    plan = dataclasses.replace(plan_of(FP32, 1), updates="in_backward")
    run_ranks(functools.partial(train, plan=plan, model_dir=folder))
    return dict(checkpoint_weights(folder / f"checkpoint_{STEPS}"))


@pytest.mark.parametrize(
    ("rank", "owner", "method", "tier"),
    [
        (1, PooledStorage, "open", "memory"),
        (0, PooledStorage, "release", "memory"),
        (1, RankBackwardUpdates, "_take", "disk"),
        (0, StageAccess, "catch_up", "disk"),
    ],
)
def test_a_run_resumes_to_the_same_bits_after_a_rank_was_killed(
    rank, owner, method, tier, undisturbed, tmp_path
):
    plan = dataclasses.replace(plan_of(FP32, 1), updates="in_backward")
    if tier == "disk":
        plan = dataclasses.replace(plan, tier="disk", disk=tmp_path / "disk", in_place=False, slabs=8)
    work = functools.partial(train, plan=plan, model_dir=tmp_path)
    (error,) = errors_beside(rank, functools.partial(work, kill=(rank, owner, method)))
    assert f"RankError: rank {rank} (process " in error and "is gone while" in error
    assert not (tmp_path / f"checkpoint_{STEPS}").exists()
    run_ranks(work)
    found = dict(checkpoint_weights(tmp_path / f"checkpoint_{STEPS}"))
    assert found.keys() == undisturbed.keys() and found
    assert all(torch.equal(value, undisturbed[name]) for name, value in found.items())
