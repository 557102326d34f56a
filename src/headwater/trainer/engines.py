"""Builds the engines of a run: makes their plan, opens the folder of the disk tier, loads weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from headwater.api.engines import disk_folder
from headwater.api.ranks import take_accelerator
from headwater.config.run import CommonInitConfig
from headwater.core.errors import CorruptError
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.calibrate import calibrate
from headwater.plan.options import device_of, resources_of
from headwater.plan.types import Plan
from headwater.store.saved_weights import Names
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.compile_choice import block_choice, plan_with_blocks
from headwater.trainer.job import Trainable
from headwater.trainer.planning import Workload, host_share, make_engine, plan_run
from headwater.trainer.ranks import NUM_CSX
from headwater.trainer.start import Start, find_trained
from headwater.trainer.waits import log_if_long


@contextmanager
def open_engine(
    init: CommonInitConfig,
    trainable: Trainable,
    work: Workload,
    *,
    blank: bool,
    show: Callable[[Plan], None] = lambda plan: None,
    fabric: Fabric = ALONE,
    measured: bool = False,
) -> Iterator[Engine]:
    """Plan and build the engine for `work`, which is training or an evaluation.

    Args:
        init: the params.
        trainable: the model with its loss.
        work: the batch and the optimizer.
        blank: initialize with zeros, since a checkpoint will replace the parameters.
        show: called with the plan before anything is allocated.
        fabric: the ranks that train together.
        measured: plan with measured rates of this machine; takes time if they are not known yet.

    Yields:
        The engine.
    """
    device, disk = device_of(init.backend), disk_folder(init.backend)

    def plan_steps() -> Plan:
        # `log_if_long` is not needed: measuring and planning print what they are doing, in every command.
        rates = None
        if measured:
            kernels = init.backend.kernels(init.precision.precision, device)
            rates = calibrate(device, disk, kernels=kernels, budget=resources_of(init.backend).host_memory)
        plan_for = functools.partial(
            plan_run,
            init,
            trainable,
            calibration=rates,
            placement=fabric.placement,
            ranks=fabric.local_size,
            share=host_share(fabric.placement, fabric.hosts, fabric.host),
        )
        return plan_with_blocks(
            work, plan_for, lambda plan: block_choice(init, trainable, plan, work, measure=measured)
        )

    # This comes first, because `calibrate` measures the accelerator of this rank.
    take_accelerator(device, fabric, where=NUM_CSX)
    plan = fabric.agree(plan_steps, Plan)
    show(plan)
    with log_if_long("allocating memory" if blank else "making the initial weights", fabric):
        engine = make_engine(
            init,
            trainable,
            plan,
            work.optimizer,
            blank=blank,
            fabric=fabric,
            sparsifier=work.sparsifier,
        )
    with engine:
        yield engine


@contextmanager
def open_loaded(
    choose: Callable[[], Start],
    open_for: Callable[[Start], AbstractContextManager[Engine]],
    load: Callable[[Engine, Start], None],
    checkpoints: CheckpointManager,
    fabric: Fabric = ALONE,
) -> Iterator[tuple[Start, Engine]]:
    """Open an engine with the weights of a start. All ranks call this.

    A checkpoint is compared with its checksums while it is loaded, so it is read once. If a checkpoint of the
    run is damaged, its engine is closed, and the next start is chosen without it.

    Args:
        choose: returns the start.
        open_for: opens an engine for a start.
        load: loads a start into its engine; raises `CorruptError` if the checkpoint is damaged.
        checkpoints: of the run.
        fabric: the ranks.

    Yields:
        The start, and the engine.

    Raises:
        CorruptError: if the checkpoint that the user names is damaged, or all checkpoints of the run are.
    """
    while True:
        start, damage = choose(), None
        with open_for(start) as engine:
            try:
                load(engine, start)
            except CorruptError as error:
                damage = error
            # Each rank reads only a part of the checkpoint, so the others may not have seen the damage.
            found = list(filter(None, fabric.gather_objects("" if damage is None else damage.what, str)))
            if not found:
                yield start, engine
                return
        assert start.path is not None, "only a checkpoint can be damaged"
        damage = damage or CorruptError(found[0], where=str(start.path), remedy="use another checkpoint")
        if not start.own:
            raise damage
        if fabric.rank == 0:  # which chooses the next start
            checkpoints.skip(start.path, damage)


@contextmanager
def trained_model(
    init: CommonInitConfig,
    trainable: Trainable,
    work: Workload,
    checkpoint: Path | None,
    *,
    names: Names | None = None,
    fabric: Fabric = ALONE,
) -> Iterator[Engine]:
    """Open an engine in eval mode with the weights of a checkpoint.

    Args:
        init: the params.
        trainable: the model.
        work: the largest batch that will be computed.
        checkpoint: its path; the newest checkpoint in the model_dir if not given.
        names: names that a parameter may have in the checkpoint; its own name if not given.
        fabric: the ranks that evaluate together. All of them call this.

    Yields:
        The engine.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged or of another shape.
    """
    checkpoints = CheckpointManager(init.model_dir)
    with open_loaded(
        lambda: fabric.agree(lambda: find_trained(checkpoint, checkpoints, init.model_dir), Start),
        lambda _: open_engine(init, trainable, work, blank=True, fabric=fabric),
        lambda engine, start: start.load(engine, names=names or (lambda name: (name,))),
        checkpoints,
        fabric,
    ) as (_, engine):
        engine.model.eval()
        yield engine
