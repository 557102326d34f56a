"""`headwater demo`: the main job in one command, on a book that ships with the package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headwater.cli import generate
from headwater.cli.fit import summary
from headwater.cli.output import open_console
from headwater.config import RunConfig, find_params, load_params
from headwater.core.errors import ConfigError
from headwater.data.assets import sample_text
from headwater.trainer.interrupt import EXIT_CODE
from headwater.trainer.session import fit, validate
from headwater.trainer.zoo_job import language_model

if TYPE_CHECKING:
    from headwater.data.statistics import Statistics

_PARAMS = "gpt/tiny"
_NUM_SLABS = 2
_PROMPT = "My father’s family name being"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater demo`."""
    parser.description = (
        "Train a small GPT on a public-domain novel by weight streaming, evaluate it, and let it write. "
        "Takes a few minutes on two cores. Started again, it goes on where it stopped."
    )
    parser.add_argument(
        "--model_dir",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where to put it (%(default)s)",
    )
    parser.add_argument("--max_steps", type=int, metavar="N", help="train less")
    parser.add_argument(
        "--num_slabs",
        type=int,
        default=_NUM_SLABS,
        metavar="N",
        help="weights on the device at a time, in stages of equal size (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares data, trains, evaluates and generates; returns the exit code."""
    console = Console(highlight=False)
    data = args.model_dir / "data"
    config = _config(args, data)
    statistics = _prepared(config, data, console)
    result = fit(config, console=open_console(config))
    if not result.interrupted:
        loss = result.validation[0].loss if result.validation else next(validate(config))[1].loss
        console.print(
            f"\nvalidation loss {loss:.3f} nats a token; knowing nothing but how often each token occurs: "
            f"{statistics.unigram_entropy:.3f}\n",
            soft_wrap=True,
        )
        console.print(_sample(config), markup=False, soft_wrap=True)
        console.print()
    for line in summary(config, result):
        console.print(line, markup=False, soft_wrap=True)
    return EXIT_CODE if result.interrupted else 0


def _config(args: argparse.Namespace, data: Path) -> RunConfig:
    overrides = {
        "model_dir": str(args.model_dir),
        "trainer.init.backend.num_slabs": args.num_slabs,
        "trainer.fit.train_dataloader.data_dir": str(data / "train"),
        "trainer.fit.val_dataloader.data_dir": str(data / "val"),
        "trainer.validate.val_dataloader.data_dir": str(data / "val"),
    }
    if args.max_steps is not None:
        overrides["max_steps"] = args.max_steps
    return load_params(find_params(_PARAMS), overrides)


def _prepared(config: RunConfig, folder: Path, console: Console) -> Statistics:
    """The statistics of the book's samples, which are made the first time."""
    try:
        from headwater.data.prepare import prepare
        from headwater.data.statistics import FILE_NAME, read_statistics
        from headwater.data.tokenizer import TrainBPE
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"preparing text needs {error.name}", remedy="pip install 'headwater[train]'"
        ) from error
    if (folder / FILE_NAME).exists():
        return read_statistics(folder)
    model = language_model(config)
    return prepare(
        [sample_text()],
        folder,
        tokenizer=TrainBPE(model.vocab_size),
        sequence_length=model.max_position_embeddings,
        progress=console.is_terminal,
    )


def _sample(config: RunConfig) -> str:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    words = ["--model_dir", str(config.init.model_dir), "--prompt", _PROMPT, "--max_new_tokens", "80"]
    return generate.continued(config, parser.parse_args(words))
