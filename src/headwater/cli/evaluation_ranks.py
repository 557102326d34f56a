"""Ranks of the commands that evaluate language models. All ranks run the same command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

from headwater.cli.output import open_console
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.core.placement import Placement
from headwater.data.codec import Codec
from headwater.fabric.cluster import join
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import Fabric
from headwater.trainer.ranks import NUM_CSX, launch, program_and_params
from headwater.trainer.tokenizer import model_codec

_Found = TypeVar("_Found")


def run_evaluation(
    config: RunConfig,
    args: argparse.Namespace,
    evaluate: Callable[[Codec, Fabric], _Found],
    report: Callable[[_Found], int],
) -> int:
    """Evaluate in the ranks that the params ask for, report the result, and return the exit code.

    Args:
        config: the run.
        args: the arguments of the command; see `add_model_arguments`.
        evaluate: evaluates with the model's tokenizer. All ranks call it.
        report: reports what `evaluate` has returned on rank 0, and returns the exit code.
    """
    # Store ranks of the params are left out: an evaluation updates no weights.
    placement = Placement(config.init.backend.cluster_config.num_csx)
    code = launch(placement, args.words, in_place=args.is_process)
    if code is not None:
        return code
    fabric = _join(config)
    with _first_rank_speaks(fabric):
        open_console(config)
        found = evaluate(model_codec(config, args.tokenizer, args.eos_id), fabric)
    return 0 if fabric.rank != 0 else report(found)


def _join(config: RunConfig) -> Fabric:
    """Connect to the other ranks of an evaluation, and return all ranks.

    Raises:
        ConfigError: if the number of ranks is not that of the params, or the ranks have different params.
        RankError: if a rank cannot be reached.
    """
    cluster = config.init.backend.cluster_config
    fabric = join(cluster.rank_timeout_s)
    if fabric.size != cluster.num_csx:
        raise ConfigError(
            f"num_csx={cluster.num_csx}, but {fabric.size} ranks were started",
            where=NUM_CSX,
            remedy=f"write --num_csx {fabric.size}",
        )
    if fabric.size > 1:
        check_consistency(fabric, program_and_params(config))
    return fabric


def refuse_ranks(args: argparse.Namespace) -> None:
    """Raise if the command line asks for several ranks. This command ignores the number in the params.

    Raises:
        ConfigError: if the command line asks for several ranks.
    """
    for flag in args.overrides:
        name, _, number = flag.rpartition("=")
        if name.rpartition(".")[2] == "num_csx" and number != "1":
            raise ConfigError(
                f"expected num_csx 1, because one rank writes the programs; got {number}",
                where=name,
                remedy="leave it out",
            )


@contextmanager
def _first_rank_speaks(fabric: Fabric) -> Iterator[None]:
    """Drop the output of all ranks but rank 0 in the context, because all ranks would print the same.

    Errors are not lost: the launcher prints them.
    """
    if fabric.rank == 0:
        yield
        return
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield
