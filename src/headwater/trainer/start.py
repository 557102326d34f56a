"""Chooses the start of a run: initial values, its own last checkpoint, or one that the user names."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, final

from torch import Tensor, nn

from headwater.convert.shards import has_weights
from headwater.core.arithmetic import Kernels
from headwater.core.errors import CheckpointError, ConfigError, CorruptError
from headwater.core.stage import StageSpec
from headwater.optim.loss_scale import LossScale
from headwater.store.saved_weights import Names
from headwater.store.snapshot_load import SavedCheckpoint, load_weights, match_weights
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager, persistent_buffers
from headwater.trainer.checkpoint_inspection import complete_checkpoints, describe
from headwater.trainer.checkpoint_names import step_of
from headwater.trainer.state import RunState
from headwater.trainer.waits import log_if_long

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig
    from headwater.plan.types import Plan

logger = logging.getLogger(__name__)
_START_OVER = "--autoload_last_checkpoint=false"

_Choice = TypeVar("_Choice", bound=Hashable)


@final
@dataclasses.dataclass(frozen=True)
class _Computation(Generic[_Choice]):
    """Something that different kernels compute with different rounding, and the texts of its warning.

    Attributes:
        was: its name with the verb of the past.
        now: the verb of the present.
        kernels: name of the kernels of each choice.
        remedies: what the run needs to continue with the kernels of each choice.
    """

    was: str
    now: str
    kernels: Mapping[_Choice, str]
    remedies: Mapping[_Choice, str]

    def warn_of_change(self, before: _Choice | None, now: _Choice, step: int) -> None:
        """Log a warning if another choice holds than up to `step`; `None` if that one is unknown."""
        if before is None or before == now:
            return
        logger.warning(
            "%s computed by %s up to step %d, and %s computed by %s now: results differ by rounding from "
            "those of a run without this change; %s",
            self.was,
            self.kernels[before],
            step,
            self.now,
            self.kernels[now],
            self.remedies[before],
        )


_ATTENTION = _Computation[bool](
    "attention was",
    "is",
    {True: "the package's kernel", False: "torch's kernel"},
    {
        True: "the package's kernel needs backend.attention: auto, a C compiler, and a processor with "
        "AVX-512 and without AMX",
        False: "backend.attention: torch continues with torch's kernel",
    },
)
_PRODUCTS = _Computation[Kernels](
    "matrix products were",
    "are",
    {"exact": "torch's kernels", "converted": "fp32 kernels", "fast": "the kernels of matmul: fast"},
    {
        "exact": "backend.matmul: exact continues with torch's kernels",
        "converted": "fp32 kernels need a run in 16 bits, backend.matmul: auto, and a processor without "
        "instructions for these 16 bits",
        "fast": "backend.matmul: fast continues with its kernels",
    },
)


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a run: a checkpoint, or initial values.

    Attributes:
        path: the checkpoint; `None`: initial values.
        state: state of the run in the checkpoint; `None` if only its weights are used.
        own: true if the checkpoint is the newest one of the same run.
        returned_to: see `RunState`.
    """

    path: Path | None = None
    state: RunState | None = None
    own: bool = False
    returned_to: int | None = None

    @property
    def step(self) -> int:
        """Training steps done before."""
        return self.state.step if self.state else 0

    def take_masks(self) -> dict[str, Tensor] | None:
        """Return the masks of sparse training in the checkpoint. The start does not keep them."""
        if self.state is None or self.state.masks is None:
            return None
        masks = dict(self.state.masks)
        self.state.masks.clear()
        return masks

    def load(self, engine: Engine, *, names: Names, strict: bool = True) -> None:
        """Load the checkpoint, if the start has one, into the engine; without a state, load only its weights.

        Args:
            engine: holds the initial values.
            names: names that a parameter may have in a checkpoint from which only the weights are loaded.
            strict: require that the checkpoint has every parameter and no other; otherwise a parameter that
                it lacks keeps its value.

        Raises:
            CheckpointError: if the checkpoint is missing, not complete, or of another model or optimizer.
            CorruptError: if bytes are damaged. The engine must not be used then.
        """
        if self.path is None:
            return
        buffers = persistent_buffers(engine.model)
        with log_if_long(f"reading the weights of {self.path}", engine.fabric):
            saved = SavedCheckpoint(self.path)
            if self.state is None:
                load_weights(engine.store, self.path, buffers, strict=strict, names=names)
            else:
                saved.restore(engine.store, buffers, strict=strict)

    def check(self, model: nn.Module, stages: Sequence[StageSpec], *, names: Names, strict: bool) -> None:
        """Raise if the checkpoint, if there is one, is of another model. `load` would raise the same error.

        Only names and shapes are read, so this is fast.

        Args:
            model: the model of the run.
            stages: of the model.
            names: see `load`.
            strict: see `load`.

        Raises:
            CheckpointError: if the checkpoint is of another model.
        """
        if self.path is None:
            return
        buffers = persistent_buffers(model)
        # `load` reports damage, because another checkpoint of the run may be chosen after it.
        with contextlib.suppress(CorruptError):
            if self.state is None:
                match_weights(stages, self.path, buffers, strict=strict, names=names)
            else:
                SavedCheckpoint(self.path).match(stages, buffers, strict=strict)

    def run_state(self, engine: Engine) -> RunState:
        """Return the state of a run that starts here with an engine."""
        state = self.state or RunState(0, LossScale.of(engine.plan.precision))
        return dataclasses.replace(
            state,
            micro_batch_size=engine.plan.micro_batch_size,
            compiled=engine.plan.blocks.compiled,
            attention_kernel=engine.plan.uses_attention_kernel,
            kernels=engine.plan.kernels,
            returned_to=self.returned_to,
        )

    def warn_of_other_kernels(self, plan: Plan) -> None:
        """Log a warning if other kernels compute attention or matrix products than before this start.

        Args:
            plan: the plan of the run that starts here.
        """
        if self.state is not None:
            _ATTENTION.warn_of_change(self.state.attention_kernel, plan.uses_attention_kernel, self.step)
            _PRODUCTS.warn_of_change(self.state.kernels, plan.kernels, self.step)


INITIAL_VALUES = Start()


def find_start(init: CommonInitConfig, named: Path | None, checkpoints: CheckpointManager) -> Start:
    """Decide where a training run starts.

    If the run has checkpoints, it starts from the newest one without known damage, so that the same command
    continues the run. A named checkpoint is used by a run without checkpoints. If it is an earlier checkpoint
    of this run, the run returns to it once; after that the same command continues from the newest one again.

    Args:
        init: the params. With `autoload_last_checkpoint: false` the run starts over.
        named: the checkpoint that the params or the command line name.
        checkpoints: of the run's model_dir.

    Returns:
        The start.

    Raises:
        CheckpointError: if the checkpoint does not exist or is not complete.
        CorruptError: if every checkpoint of the run is damaged.
    """
    # Without strict loading, a parameter that a checkpoint lacks keeps its initial value. If a damaged
    # checkpoint were loaded before it, the parameter could have a value of that checkpoint instead.
    deep = init.checkpoint.disable_strict_checkpoint_loading
    own = checkpoints.newest_whole(deep=deep) if init.checkpoint.autoload_last_checkpoint else None
    state = None if own is None else read_state(own)
    if named is None:
        if own is not None and init.checkpoint_states != ("all",):
            logger.info(
                "LoadCheckpointStates is not used, since this run continues its newest checkpoint; to start "
                "over: %s",
                _START_OVER,
            )
        return _start_of_own(own, state)
    target = step_of(named) if own is not None and checkpoints.is_own(named) else None
    # The run has returned to `target` once already, or is there now, so it continues from its newest step.
    if own is not None and (target is None or target in (state and state.returned_to, step_of(own))):
        if own.resolve() != named.resolve():
            logger.info(
                "ckpt_path %s is not used, since this run has checkpoints; to start over: %s",
                named,
                _START_OVER,
            )
        return _start_of_own(own, state)
    _refuse_other_folder(named)
    if _weights_only(init):
        return Start(named, returned_to=target)
    return Start(named, read_state(named), returned_to=target)


def _refuse_other_folder(named: Path) -> None:
    """Raise if a path that should be a checkpoint is the folder of a run, or of weights without a run.

    Raises:
        CheckpointError: if it is; the remedy names the checkpoint, or the command that makes one.
    """
    found = complete_checkpoints(named)
    if found:
        raise CheckpointError(
            "expected a checkpoint, got the model_dir of a run",
            where=str(named),
            remedy=f"name one of its checkpoints, for example {found[-1]}",
        )
    if has_weights(named):
        raise CheckpointError(
            "expected a checkpoint of a run, got a folder of weights",
            where=str(named),
            remedy=f"make a run of it first: headwater checkpoint import {named} --model_dir RUN",
        )


def _start_of_own(own: Path | None, state: RunState | None) -> Start:
    return Start(own, state, own=own is not None, returned_to=state.returned_to if state else None)


def read_state(path: Path) -> RunState:
    """Return the state of the run in a checkpoint, without reading its weights."""
    return RunState.from_dict(describe(path).state, where=str(path))


def find_trained(named: Path | None, checkpoints: CheckpointManager, model_dir: Path) -> Start:
    """Return the checkpoint to evaluate: the named one, or the newest in the model_dir without known damage.

    Raises:
        CheckpointError: if there is no checkpoint.
    """
    if named is not None:
        _refuse_other_folder(named)
    path = named or checkpoints.newest_whole()
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to evaluate",
            where=str(model_dir),
            remedy="train first with headwater fit, or name a checkpoint with --checkpoint_path",
        )
    return Start(path, own=named is None)


def _weights_only(init: CommonInitConfig) -> bool:
    if init.checkpoint_states in (("all",), ("model",)):
        return init.checkpoint_states == ("model",)
    raise ConfigError(
        f"expected load_checkpoint_states to be all or model, got {', '.join(init.checkpoint_states)}",
        where="trainer.init.callbacks: LoadCheckpointStates",
        remedy="write all, or model to use only the weights",
    )
