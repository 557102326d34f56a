"""Where a run starts: from nothing, from its own last checkpoint, or from one that the user names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headwater.config.run import SetupConfig
from headwater.core.errors import CheckpointError, ConfigError
from headwater.optim.loss_scale import LossScale
from headwater.store.snapshot_load import Names
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager, persistent_buffers
from headwater.trainer.state import RunState


@dataclasses.dataclass(frozen=True)
class Start:
    """A starting point.

    Attributes:
        path: the checkpoint; `None`: initial values.
        state: where the run stood then; `None` where only weights are taken from the checkpoint.
        own: whether it is a checkpoint of the same run.
    """

    path: Path | None = None
    state: RunState | None = None
    own: bool = False

    def enter(
        self, engine: Engine, checkpoints: CheckpointManager, *, names: Names, strict: bool = True
    ) -> RunState:
        """Bring the engine to this point.

        Args:
            engine: holds the initial values.
            checkpoints: reads the checkpoint.
            names: what a parameter may be called in a checkpoint of which only the weights are taken.
            strict: whether the checkpoint must have every parameter and no other.

        Returns:
            Where the run stands.
        """
        if self.path is not None:
            checkpoints.load(
                engine.store,
                self.path,
                weights_only=self.state is None,
                strict=strict,
                buffers=persistent_buffers(engine.model),
                names=names,
            )
        if self.state is None:
            return RunState(0, LossScale.of(engine.plan.precision), engine.plan.micro_batch_size)
        return dataclasses.replace(self.state, micro_batch_size=engine.plan.micro_batch_size)


def find_start(init: SetupConfig, named: Path | None, checkpoints: CheckpointManager) -> Start:
    """Where a training run starts.

    Args:
        init: the params.
        named: the checkpoint that the params or the command line name; it comes before the run's own.
        checkpoints: of the run's model_dir.

    Raises:
        CheckpointError: if the checkpoint does not exist or is not complete.
    """
    own = checkpoints.latest() if init.checkpoint.autoload_last_checkpoint else None
    path = named or own
    if path is None:
        return Start()
    if named is not None and _weights_only(init):
        return Start(path)
    return Start(path, read_state(checkpoints, path), own=path == own)


def read_state(checkpoints: CheckpointManager, path: Path) -> RunState:
    """The state of the run in a checkpoint, without its weights."""
    return RunState.from_dict(checkpoints.describe(path).state, where=str(path))


def find_trained(named: Path | None, checkpoints: CheckpointManager, model_dir: Path) -> Path:
    """The checkpoint to evaluate: the one that is named, or the newest in the model_dir.

    Raises:
        CheckpointError: if there is none.
    """
    path = named or checkpoints.latest()
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to evaluate",
            where=str(model_dir),
            remedy="train first with headwater fit, or name one with --checkpoint_path",
        )
    return path


def _weights_only(init: SetupConfig) -> bool:
    if init.checkpoint_states in (("all",), ("model",)):
        return init.checkpoint_states == ("model",)
    raise ConfigError(
        f"load_checkpoint_states is {', '.join(init.checkpoint_states)}",
        where="trainer.init.callbacks: LoadCheckpointStates",
        remedy="write all, or model for the weights alone",
    )
