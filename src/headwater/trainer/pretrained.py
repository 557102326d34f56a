"""Reading weights from a checkpoint, and writing given weights as the first checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from headwater.config.run import RunConfig
from headwater.core.errors import CheckpointError
from headwater.core.stage import ParamSpec
from headwater.optim.loss_scale import LossScale
from headwater.plan.partition import find_stages
from headwater.store.rule import UpdateRule
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.planning import optimizer_of
from headwater.trainer.state import RunState
from headwater.trainer.zoo_job import zoo_trainable


def checkpoint_weights(
    path: Path, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter in a checkpoint whose name `is_wanted`, with its name, one at a time."""
    for file in SavedCheckpoint(path).weights():
        for name in filter(is_wanted, file.places):
            yield name, file.read_whole(name)


def import_weights(config: RunConfig, readers: Mapping[str, Callable[[], torch.Tensor]]) -> Path:
    """Write a checkpoint of step 0 from which a run starts with the given weights.

    One parameter is in memory at a time.

    Args:
        config: the run; the caller holds the lock of its model_dir.
        readers: by name, a function that returns the value of a parameter, for every parameter of the model.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: if the weights are not those of the model.
    """
    init, trainable = config.init, zoo_trainable(config.init)

    def read(spec: ParamSpec) -> torch.Tensor:
        name = next((name for name in (spec.name, *spec.aliases) if name in readers), None)
        value = None if name is None else readers[name]()
        if value is None or tuple(value.shape) != spec.shape:
            found = "none" if value is None else f"shape {tuple(value.shape)}"
            raise CheckpointError(
                f"expected a tensor of shape {spec.shape} for {spec.name} (model's config), got {found}",
                remedy="check that the model's config belongs to the checkpoint",
            )
        return value

    # No plan is needed: a checkpoint does not depend on it, and another machine may train the model.
    stages = find_stages(trainable.model, init.precision.precision).stages
    state = RunState(0, LossScale.of(init.precision.precision))
    rule = UpdateRule(optimizer_of(init, trainable))
    return CheckpointManager(init.model_dir).save_first(stages, rule, read, state.to_dict())
