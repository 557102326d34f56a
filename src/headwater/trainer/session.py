"""A run from a params file to its end: training, evaluation, or a trained model to use."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from headwater.config.run import InitConfig, RunConfig
from headwater.config.sections import DataConfig, FitConfig
from headwater.core.buffers import keep_pages
from headwater.core.errors import ConfigError
from headwater.plan.calibrate import calibrate
from headwater.plan.report import render_plan
from headwater.plan.types import Plan
from headwater.stream.engine import Engine
from headwater.trainer.callback import ValidateEnd
from headwater.trainer.checkpoint import (
    CheckpointManager,
    ModelDirLock,
    complete_checkpoints,
    persistent_buffers,
)
from headwater.trainer.datasets import find_tokenizer, open_data
from headwater.trainer.evaluate import Evaluation, evaluate
from headwater.trainer.interrupt import interrupts, shielded
from headwater.trainer.logs import make_callbacks
from headwater.trainer.loop import Trainer
from headwater.trainer.planning import (
    Workload,
    device_of,
    make_engine,
    meta_model,
    plan_run,
    training_workload,
)
from headwater.trainer.run_dir import RunDir
from headwater.trainer.start import Start, find_start, find_trained

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a training run ended.

    Attributes:
        step: steps done, those of earlier processes included.
        interrupted: whether somebody stopped it before its last step.
        checkpoint: its newest checkpoint.
        validation: the last evaluation, by data set; empty where this process did none.
    """

    step: int
    interrupted: bool
    checkpoint: Path | None
    validation: list[ValidateEnd]


def fit(config: RunConfig, *, console: Console | None = None) -> FitResult:
    """Train as the params say, from the last checkpoint in the model_dir on.

    Args:
        config: the params.
        console: shows the plan and the progress; nothing is shown without.

    Raises:
        HeadwaterError: if something is wrong; the last complete checkpoint is then intact.
    """
    init, section = config.init, _fit_section(config)
    train = open_data(section.train_dataloader, init.model, seed=init.seed, repeat=True)
    evaluations = [open_data(d, init.model, seed=init.seed, repeat=False) for d in section.val_dataloader]
    run_dir = RunDir(init.model_dir)
    with ModelDirLock(init.model_dir), training_disk(init) as disk:
        checkpoints = CheckpointManager(init.model_dir, init.keep_checkpoints)
        strict = not init.checkpoint.disable_strict_checkpoint_loading
        start = find_start(init, section.ckpt_path, checkpoints)
        work = training_workload(
            init,
            section.train_dataloader.batch_size,
            train.sequence_length,
            start.state.micro_batch_size if start.state else None,
        )

        def show(plan: Plan) -> None:
            run_dir.write_plan(plan)
            if console is not None:
                console.print(render_plan(plan))

        with open_engine(init, work, disk, blank=strict and start.path is not None, show=show) as engine:
            trainer = Trainer(
                engine,
                init,
                start.enter(engine, checkpoints, strict=strict),
                train=train.create_dataloader(),
                evaluations=[data.create_dataloader() for data in evaluations],
                checkpoints=checkpoints,
                callbacks=make_callbacks(init, run_dir, console),
                saved_step=start.state.step if start.own and start.state else None,
            )
            run_dir.write_params(config)
            run_dir.keep_tokenizer(find_tokenizer(section.train_dataloader))
            return _train(trainer, start, checkpoints)


def validate(config: RunConfig) -> Evaluation:
    """Evaluate a checkpoint on the data of the section `validate`.

    Args:
        config: the params; `trainer.validate.ckpt_path` names the checkpoint, or else it is the newest.
    """
    section = config.validation
    if section is None:
        raise ConfigError(
            "the params have no data to evaluate on",
            where=str(config.source),
            remedy="add trainer.validate.val_dataloader",
        )
    return evaluate_checkpoint(config, section.val_dataloader, section.ckpt_path)


def validate_all(config: RunConfig) -> Iterator[tuple[Path | None, DataConfig, Evaluation]]:
    """Evaluate several checkpoints on several data sets, as the section `validate_all` says.

    Args:
        config: the params; where they name no checkpoints, all in the model_dir are evaluated.

    Yields:
        The checkpoint, the data set, and what was found.
    """
    section = config.validate_all
    if section is None:
        raise ConfigError(
            "the params have no section validate_all",
            where=str(config.source),
            remedy="add trainer.validate_all.val_dataloaders, or leave --all out",
        )
    newest: tuple[Path | None, ...] = (None,)
    for path in section.ckpt_paths or complete_checkpoints(config.init.model_dir) or newest:
        for loader in section.val_dataloaders:
            yield path, loader, evaluate_checkpoint(config, loader, path)


def evaluate_checkpoint(config: RunConfig, loader: DataConfig, checkpoint: Path | None) -> Evaluation:
    """Evaluate one checkpoint, the newest if none is named, on one data set."""
    data = open_data(loader, config.init.model, seed=config.init.seed, repeat=False)
    size = config.init.backend.micro_batch_size
    work = Workload(size or loader.batch_size, data.sequence_length, micro_batch_size=size)
    with trained_model(config.init, work, checkpoint) as engine:
        found = evaluate(engine, shielded(data.create_dataloader()), max_batches=config.init.loop.eval_steps)
    assert found is not None, "nobody asked to stop"
    return found


@contextmanager
def trained_model(init: InitConfig, work: Workload, checkpoint: Path | None) -> Iterator[Engine]:
    """An engine in eval mode with the weights of a checkpoint, the newest in the model_dir if none is named.

    Args:
        init: the params.
        work: the largest batch that will be computed.
        checkpoint: its path.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged or of another shape.
    """
    checkpoints = CheckpointManager(init.model_dir)
    path = find_trained(checkpoint, checkpoints, init.model_dir)
    with _scratch_disk(init) as disk, open_engine(init, work, disk, blank=True) as engine:
        checkpoints.load(engine.store, path, weights_only=True, buffers=persistent_buffers(engine.model))
        engine.model.eval()
        yield engine


def _train(trainer: Trainer, start: Start, checkpoints: CheckpointManager) -> FitResult:
    if start.path is not None:
        logger.info("going on from step %d: %s", trainer.state.step, start.path)
    first_step = trainer.state.step
    with interrupts() as interrupt:
        trainer.fit(interrupt)
    if trainer.state.step == first_step and not interrupt.requested:
        logger.warning("nothing to do: step %d was the last; train longer with --num_steps", first_step)
    return FitResult(
        step=trainer.state.step,
        interrupted=interrupt.requested,
        checkpoint=checkpoints.latest(),
        validation=trainer.validation,
    )


@contextmanager
def open_engine(
    init: InitConfig,
    work: Workload,
    disk: Path | None,
    *,
    blank: bool,
    show: Callable[[Plan], None] = lambda plan: None,
) -> Iterator[Engine]:
    """The engine for `work`; `blank`: a checkpoint will replace the parameters. The plan is shown first."""
    device = device_of(init.backend)
    model = meta_model(init.model)
    plan = plan_run(init, model, work, disk=disk, calibration=calibrate(device, disk))
    show(plan)
    if device == "cpu" and init.backend.allocator == "tuned" and plan.memory_is_ample:
        keep_pages()
    with make_engine(init, model, plan, work.optimizer, blank=blank) as engine:
        yield engine


@contextmanager
def training_disk(init: InitConfig) -> Iterator[Path | None]:
    """The folder of the disk tier of the run in this model_dir; what a killed run left there is reused."""
    if init.backend.disk is None:
        yield None
        return
    key = hashlib.blake2b(str(init.model_dir.resolve()).encode(), digest_size=6).hexdigest()
    folder = init.backend.disk.path / f"{init.model_dir.resolve().name}-{key}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _scratch_disk(init: InitConfig) -> Iterator[Path | None]:
    """A folder of the disk tier for one evaluation, which may run beside training."""
    if init.backend.disk is None:
        yield None
        return
    init.backend.disk.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=init.backend.disk.path, prefix="evaluate-") as folder:
        yield Path(folder)


def _fit_section(config: RunConfig) -> FitConfig:
    if config.fit is None:
        raise ConfigError(
            "the params have no data to train on",
            where=str(config.source),
            remedy="add trainer.fit.train_dataloader",
        )
    return config.fit
