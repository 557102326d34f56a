"""Reading weights from a checkpoint, and writing given weights as the first checkpoint of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from headwater.api.engines import disk_folder
from headwater.config.run import RunConfig
from headwater.convert.shards import ShardWriter, plan_shards
from headwater.optim.loss_scale import LossScale
from headwater.store.snapshot_load import SavedCheckpoint, load_weights
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.engines import open_engine
from headwater.trainer.planning import Workload, optimizer_of
from headwater.trainer.state import RunState
from headwater.trainer.zoo_job import zoo_trainable


def checkpoint_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter in a checkpoint with its name, one at a time."""
    for file in SavedCheckpoint(path).weights():
        for name, place in file.places.items():
            yield name, file.read(name, 0, torch.Size(place.shape).numel()).view(place.shape)


def import_weights(config: RunConfig, weights: Iterable[tuple[str, torch.Tensor]], scratch: Path) -> Path:
    """Write a checkpoint of step 0 from which a run starts with the given weights.

    With a disk tier in the plan, one tensor or stage is in memory at a time.

    Args:
        config: the run; the caller holds the lock of its model_dir.
        weights: every parameter by name, in any order.
        scratch: folder for temporary files of the weights.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the weights are not those of the model.
    """
    init, trainable = config.init, zoo_trainable(config.init)
    layout = {name: (torch.float32, tuple(p.shape)) for name, p in trainable.model.named_parameters()}
    with ShardWriter(scratch, plan_shards(layout, max_shard_bytes=1 << 62)) as writer:
        for name, tensor in weights:
            writer.write(name, tensor)
    work = Workload(1, optimizer_of(init, trainable))
    checkpoints = CheckpointManager(init.model_dir)
    with open_engine(init, trainable, work, disk_folder(init.backend), blank=True) as engine:
        load_weights(engine.store, scratch)
        state = RunState(0, LossScale.of(init.precision.precision))
        path = checkpoints.save(engine.store, 0, state.to_dict())
        # Within the context: the checkpoint is written from the store, which is closed after it.
        checkpoints.wait()
    return path
