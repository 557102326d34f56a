"""Complete runs: training, or the evaluation of a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from headwater.config.data import DataConfig
from headwater.config.run import CommonInitConfig, RunConfig
from headwater.core.errors import ConfigError
from headwater.core.placement import JOB
from headwater.fabric.cluster import join
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.outlook import RunLength
from headwater.plan.report import render_plan
from headwater.plan.types import Plan
from headwater.sparsity.sparsifier import Sparsifier
from headwater.trainer.callback import ValidateEnd
from headwater.trainer.checkpoint import CheckpointManager, check_tensors
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.datasets import errors_of, open_data
from headwater.trainer.engines import open_engine, open_loaded, trained_model
from headwater.trainer.evaluate import Evaluation, evaluate
from headwater.trainer.interrupt import Interrupt, interrupts, shielded
from headwater.trainer.job import Batch, Job, Trainable
from headwater.trainer.logs import STEP_CALLBACKS, make_callbacks
from headwater.trainer.loop import Trainer
from headwater.trainer.memory_watch import memory_watch
from headwater.trainer.model_dir_lock import ModelDirLock
from headwater.trainer.op_profiler import check_reached
from headwater.trainer.planning import Workload, check_settings, run_length, training_workload
from headwater.trainer.ranks import check_num_ranks, program_and_params
from headwater.trainer.run_dir import RunDir
from headwater.trainer.start import Start, find_start
from headwater.trainer.tracking.make import import_packages
from headwater.trainer.waits import log_if_long
from headwater.trainer.zoo_job import fit_section, zoo_job, zoo_trainable

if TYPE_CHECKING:
    from headwater.stream.engine import Engine

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of a training run.

    Attributes:
        step: steps done, including those of earlier processes.
        interrupted: True if it was stopped before its last step.
        checkpoint: its newest checkpoint.
        validation: results of the last evaluation, one for each data set; empty if this process made none.
    """

    step: int
    interrupted: bool
    checkpoint: Path | None
    validation: list[ValidateEnd]


def fit(
    config: RunConfig,
    *,
    console: Console | None = None,
    describe: Callable[[Plan, RunLength], RenderableType] = render_plan,
) -> FitResult:
    """Train as the params say, from the last checkpoint in the model_dir on.

    Args:
        config: the params.
        console: shows the plan and the progress; nothing is shown if not given.
        describe: returns the description of the plan that the console shows.

    Raises:
        HeadwaterError: if the run fails; the last complete checkpoint is then intact.
    """
    cluster = config.init.backend.cluster_config
    fabric = join(cluster.rank_timeout_s, cluster.num_memx)
    # Before the data are compared: if the params differ, the error must name them and not the different data
    # to which they lead.
    if fabric.size > 1:
        check_consistency(fabric, program_and_params(config))
    check_settings(config.init, fit_section(config).train_dataloader.batch_size, fabric)
    job = zoo_job(config, fabric)
    if config.init.evaluates_tasks:
        from headwater.trainer.task_callbacks import harness_callbacks

        job = dataclasses.replace(job, callbacks=harness_callbacks(config))
    return fit_job(job, console=console, fabric=fabric, describe=describe)


def fit_job(
    job: Job,
    *,
    console: Console | None = None,
    fabric: Fabric = ALONE,
    describe: Callable[[Plan, RunLength], RenderableType] = render_plan,
) -> FitResult:
    """Run a training job, from the last checkpoint in its model_dir on.

    Args:
        job: the run; its training data are those of this rank.
        console: shows the plan and the progress; nothing is shown if not given.
        fabric: the ranks that train together; rank 0 writes checkpoints and logs.
        describe: returns the description of the plan that the console shows.

    Raises:
        HeadwaterError: if the run fails; the last complete checkpoint is then intact.
    """
    init, run_dir = job.init, RunDir(job.init.model_dir)
    check_num_ranks(init, fabric)
    leads = fabric.rank == 0
    console = console if leads else None
    # Only rank 0 writes into the model_dir. The lock comes before every check of its files, which a run that
    # holds the folder may be writing.
    lock = ModelDirLock(init.model_dir) if leads else nullcontext()
    with lock:
        if leads:
            run_dir.check()
            check_tensors(job.trainable.model)
            import_packages(init)
        checkpoints = CheckpointManager(init.model_dir, init.keep_checkpoints)

        def show(plan: Plan, done: int) -> None:
            if leads:
                run_dir.write_plan(plan)
            if console is not None:
                if job_name := os.environ.get(JOB):
                    console.print(f"job {job_name} of the queue")
                console.print(describe(plan, run_length(job.trainable, init.loop, done)))

        with _started(job, checkpoints, fabric, show) as (start, engine, sparsifier):
            trainer = Trainer(
                engine,
                job,
                start.run_state(engine),
                checkpoints=checkpoints,
                callbacks=[*make_callbacks(init, run_dir, console, fabric), *job.callbacks],
                # A checkpoint of another run is written again, so that this model_dir has it too.
                saved_step=start.step if start.own and start.state else None,
                sparsifier=sparsifier,
            )
            # The start is loaded now. A run that cannot start must not change files of an earlier run.
            if leads:
                job.write(run_dir)
            first_step = trainer.state.step
            _announce(trainer, engine, start, checkpoints)
            limit = trainer.plan.host_limit
            with interrupts(checkpoints.latest) as interrupt, memory_watch(interrupt, limit):
                trainer.fit(interrupt)
            return _result(trainer, first_step, interrupt, checkpoints)


@contextmanager
def _started(
    job: Job, checkpoints: CheckpointManager, fabric: Fabric, show: Callable[[Plan, int], None]
) -> Iterator[tuple[Start, Engine, Sparsifier | None]]:
    """Open an engine with the weights of the start of a run.

    Args:
        job: the run.
        checkpoints: of the run.
        fabric: the ranks that train together.
        show: called before anything is allocated, with the plan and the steps that earlier processes did.

    Yields:
        The start, the engine, and the masks of sparse training.
    """
    init, trainable = job.init, job.trainable
    sparsifier: Sparsifier | None = None
    strict = not init.checkpoint.disable_strict_checkpoint_loading

    def check_and_show(plan: Plan, start: Start) -> None:
        # Weights of another model are refused before the plan is shown and memory is allocated.
        start.check(trainable.model, plan.trace.stages, names=trainable.pretrained_names, strict=strict)
        show(plan, start.step)

    def open_for(start: Start) -> AbstractContextManager[Engine]:
        nonlocal sparsifier
        end_step = job.end_step(start.step)
        for profile in init.profiles:  # before planning and reading weights, which may take minutes
            check_reached(profile.start_step, profile.end_step, end_step)
        blank = strict and start.path is not None
        if not blank:  # before planning, which may fail on a busy machine
            with log_if_long("reading the weights to start with", fabric):
                trainable.check_initial()
        batch_size = job.batch_size // fabric.num_csx
        work = training_workload(init, trainable, batch_size, start, data_workers=job.data_workers)
        work = dataclasses.replace(work, steps=max(0, end_step - start.step))
        sparsifier = work.sparsifier
        return open_engine(
            init,
            trainable,
            work,
            blank=blank,
            show=lambda plan: check_and_show(plan, start),
            fabric=fabric,
            measured=True,
        )

    with open_loaded(
        lambda: fabric.agree(lambda: find_start(init, job.checkpoint, checkpoints), Start),
        open_for,
        lambda engine, start: start.load(engine, names=trainable.pretrained_names, strict=strict),
        checkpoints,
        fabric,
    ) as (start, engine):
        # The same object as in the plan, so that the masks are in memory only once.
        yield start, engine, sparsifier


def _announce(trainer: Trainer, engine: Engine, start: Start, checkpoints: CheckpointManager) -> None:
    """Log where the run begins, warn of a full disk, and set later checkpoints of an earlier run aside."""
    if start.path is not None:
        if start.state is None:
            logger.info("starting with the weights of %s", start.path)
        else:
            logger.info("continuing from step %d: %s", trainer.state.step, start.path)
            if trainer.leads:
                start.warn_of_other_kernels(trainer.plan)
    first_step = trainer.state.step
    # A run that has already reached its end does not repeat a step, so later checkpoints keep their names.
    if first_step < trainer.end_step and trainer.leads:
        checkpoints.warn_of_full_disk(engine.store)
        for path in checkpoints.set_aside(first_step, start.path):
            logger.warning(
                "this run starts at an earlier step, so a later checkpoint was set aside: %s", path
            )


def _result(
    trainer: Trainer, first_step: int, interrupt: Interrupt, checkpoints: CheckpointManager
) -> FitResult:
    """Return the result of a run that began at `first_step`; log it if there was nothing to do."""
    if trainer.state.step == first_step and not interrupt.requested:
        logger.warning("nothing to do: step %d was the last one; --max_steps sets a later one", first_step)
    return FitResult(
        step=trainer.state.step,
        interrupted=interrupt.requested,
        checkpoint=checkpoints.latest(),
        validation=trainer.validation,
    )


def validate(config: RunConfig) -> Iterator[tuple[DataConfig, Evaluation]]:
    """Evaluate a checkpoint on the data of the section `validate`, or else of `fit.val_dataloader`.

    Args:
        config: the params; `trainer.validate.ckpt_path` names the checkpoint, otherwise it is the newest.

    Yields:
        The section of the data set, and its result.

    Raises:
        ConfigError: if the params have no data to evaluate on.
    """
    section = config.validation
    own = () if section is None else (section.val_dataloader,)
    loaders = own or (() if config.fit is None else config.fit.val_dataloader)
    if not loaders:
        raise ConfigError(
            "the params have no data to evaluate on",
            where=str(config.source),
            remedy="add trainer.validate.val_dataloader, or trainer.fit.val_dataloader",
        )
    _warn_of_step_callbacks(config.init)
    checkpoint = None if section is None else section.ckpt_path
    for loader in loaders:
        yield loader, evaluate_checkpoint(config, loader, checkpoint)


def validate_all(config: RunConfig) -> Iterator[tuple[Path | None, DataConfig, Evaluation]]:
    """Evaluate several checkpoints on several data sets, as the section `validate_all` says.

    Args:
        config: the params; if they name no checkpoints, all in the model_dir are evaluated.

    Yields:
        The checkpoint, the section of the data set, and its result.
    """
    section = config.validate_all
    if section is None:
        raise ConfigError(
            "the params have no section validate_all",
            where=str(config.source),
            remedy="add trainer.validate_all.val_dataloaders, or leave --all out",
        )
    _warn_of_step_callbacks(config.init)
    newest: tuple[Path | None, ...] = (None,)
    for path in section.ckpt_paths or complete_checkpoints(config.init.model_dir) or newest:
        for loader in section.val_dataloaders:
            yield path, loader, evaluate_checkpoint(config, loader, path)


def _warn_of_step_callbacks(init: CommonInitConfig) -> None:
    """Warn of callbacks of the params that have no effect on an evaluation."""
    names = [name for name in STEP_CALLBACKS if init.has_callback(name)]
    if names:
        logger.warning("%s: without effect here, since an evaluation has no training steps", ", ".join(names))


def evaluate_checkpoint(config: RunConfig, loader: DataConfig, checkpoint: Path | None) -> Evaluation:
    """Evaluate one checkpoint on one data set; `None`: the newest checkpoint in the model_dir."""
    with errors_of("val_dataloader"):
        data = open_data(loader, config.init.model, seed=config.init.seed, repeat=False)
    trainable = zoo_trainable(config.init, data.sequence_length)
    return evaluate_data(config.init, trainable, data.create_dataloader(), loader.batch_size, checkpoint)


def evaluate_data(
    init: CommonInitConfig,
    trainable: Trainable,
    batches: Iterable[Batch],
    batch_size: int,
    checkpoint: Path | None,
) -> Evaluation:
    """Evaluate one checkpoint on `batches`; `None`: the newest checkpoint in the model_dir."""
    size = init.backend.micro_batch_size
    # The loss of such a batch is not the mean of the losses of its parts.
    if not trainable.divisible:
        size = batch_size
    work = Workload(size or batch_size, micro_batch_size=size)
    with trained_model(init, trainable, work, checkpoint) as engine:
        found = evaluate(engine, trainable, shielded(batches), max_batches=init.loop.eval_steps)
    assert found is not None, "this evaluation is never asked to stop"
    return found
