"""`headwater plan`: show the plan of a run on this machine, without training."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import torch
from rich.console import Console

from headwater.cli.arguments import PLANNING, USAGE, add_params_arguments, read_params
from headwater.cli.cluster import add_cluster_arguments, check_cluster_arguments, run_cluster
from headwater.cli.following import add_interrupt_option
from headwater.cli.output import open_console
from headwater.cli.remote_commands import plan_there
from headwater.core.batches import equal_share
from headwater.core.errors import ConfigError, PlanError
from headwater.core.placement import Placement
from headwater.fabric.launch.cores import num_cores
from headwater.plan.calibrate import calibrate
from headwater.plan.options import device_of, resources_of
from headwater.plan.report import draw_plan, render_plan
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.compile_choice import block_choice, plan_with_blocks
from headwater.trainer.machine_file import write_machine
from headwater.trainer.planning import host_share, plan_run, run_length, training_workload
from headwater.trainer.start import find_start
from headwater.trainer.zoo_job import data_workers, zoo_trainable

_PATIENCE_S = 300.0
"""The most seconds that measuring the machine may take, if the user asks for a measurement."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater plan`."""
    parser.description = (
        "Show how a run would train on this machine: the stages of the model, where their weights are kept, "
        "and the predicted memory and time of a step. Nothing is trained, and the data need not exist. If "
        "the run has checkpoints, or ckpt_path names one, the plan is that of the continued run. The speed "
        "of this machine is measured the first time, which takes some seconds. "
        "With --appliance ssh://host the plan is that of a run on that machine."
    )
    parser.usage = (
        "headwater plan [-h] [--png FILE] [--sequence_length N] [--recalibrate] [--write_cluster FILE] "
        f"[--cluster FILE [--counts N,N,…] [--scaling strong|weak] [--out DIR]] {USAGE}"
    )
    add_params_arguments(parser, PLANNING)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the plan")
    parser.add_argument(
        "--sequence_length", type=int, metavar="N", help="tokens per sample (max_position_embeddings)"
    )
    parser.add_argument("--recalibrate", action="store_true", help="measure the speed of this machine again")
    add_cluster_arguments(parser)
    add_interrupt_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan and return the exit code."""
    check_cluster_arguments(args)
    config = read_params(args)
    if config.fit is None:
        raise ConfigError(
            "a plan needs the batch size, but trainer.fit.train_dataloader is missing",
            where=str(config.source),
            remedy="add this section; its data need not exist",
        )
    if args.appliance is not None:
        return plan_there(config, args, args.appliance)
    open_console(config)
    init = config.init
    trainable = zoo_trainable(init, args.sequence_length)
    batch_size = config.fit.train_dataloader.batch_size
    if args.cluster is not None:
        return run_cluster(args, config, trainable, batch_size)
    placement, device = init.backend.placement, device_of(init.backend)
    ranks = _ranks_here(placement)
    if ranks > 1 and device == "cpu":
        # The machine is measured with the number of threads that each rank has in a run.
        torch.set_num_threads(num_cores() // min(placement.num_csx, num_cores()))
    patient = args.recalibrate or args.write_cluster is not None  # the user asks for a measurement
    rates = calibrate(
        device,
        resources_of(init.backend).disk,
        kernels=init.backend.kernels(init.precision.precision, device),
        recalibrate=args.recalibrate,
        most_wall_s=_PATIENCE_S if patient else None,
    )
    workers = data_workers(config.fit)
    share_of_batch = equal_share(batch_size, placement.num_csx)
    start = find_start(init, config.fit.ckpt_path, CheckpointManager(init.model_dir))
    work = training_workload(init, trainable, share_of_batch, start, data_workers=workers)
    share = host_share(placement, [rank // ranks for rank in range(placement.size)], 0)
    run = run_length(trainable, init.loop, start.step)
    work = dataclasses.replace(work, steps=run.steps)

    plan_for = functools.partial(
        plan_run, init, trainable, calibration=rates, placement=placement, ranks=ranks, share=share
    )
    plan = plan_with_blocks(
        work, plan_for, lambda plan: block_choice(init, trainable, plan, work, measure=False)
    )
    console = Console()
    console.print(render_plan(plan, run))
    if args.png is not None:
        draw_plan(plan, args.png)
        console.print(f"drawn in {args.png}")
    if args.write_cluster is not None:
        if rates is None:
            raise PlanError(
                "a cluster file needs the speed of this machine, which could not be measured",
                remedy="run the command again when the machine is idle",
            )
        assert plan.budget is not None, "a new plan has budgets"
        write_machine(args.write_cluster, rates, plan.budget, plan.device)
    return 0


def _ranks_here(placement: Placement) -> int:
    """Return the number of ranks on this machine. Print a notice if the run needs further machines."""
    ranks = num_cores()
    if placement.num_csx <= ranks:
        return placement.size
    print(
        f"note: {placement.num_csx} CSXs need several hosts; the plan is for one host with {ranks} CSXs",
        file=sys.stderr,
    )
    return ranks
