"""`headwater demo`: prepare data, train, evaluate and generate in one command, on a shipped book."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headwater.cli import generate
from headwater.cli.fit import summary
from headwater.cli.output import open_console
from headwater.config.files import find_params
from headwater.config.run import RunConfig, load_params
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.packages import importing
from headwater.core.units import counted, format_bytes, format_count, format_duration
from headwater.data.assets import sample_text
from headwater.plan.outlook import RunLength
from headwater.plan.types import Plan
from headwater.trainer.session import fit, validate
from headwater.trainer.zoo_job import language_model

if TYPE_CHECKING:
    from headwater.data.statistics import Statistics

_PARAMS = "gpt/tiny"
_NUM_SLABS = 2
_PROMPT = "My father’s family name being"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater demo`."""
    parser.description = (
        "Train a small GPT on a public-domain novel by weight streaming, evaluate it, and generate text. "
        "Takes a few minutes on two cores. Started again, the demo continues where it stopped."
    )
    parser.add_argument(
        "--model_dir",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="folder for data, checkpoints and loss curve (%(default)s)",
    )
    parser.add_argument("--max_steps", type=int, metavar="N", help="train fewer steps")
    parser.add_argument(
        "--num_slabs",
        type=int,
        default=_NUM_SLABS,
        metavar="N",
        help="number of stages whose weights are on the device at the same time (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare data, train, evaluate and generate; return the exit code."""
    console = Console(highlight=False)
    data = args.model_dir / "data"
    config = _config(args, data)
    console.print(_INTRODUCTION, markup=False, soft_wrap=True)
    statistics = _prepared(config, data, console)
    result = fit(config, console=open_console(config), describe=_plan_in_words)
    if not result.interrupted:
        loss = result.validation[0].loss if result.validation else next(validate(config))[1].loss
        console.print(
            f"\nvalidation loss {loss:.3f} nats per token; a model that only knows token frequencies "
            f"has {statistics.unigram_entropy:.3f}\n\nThe model continues {_PROMPT!r}:\n",
            soft_wrap=True,
        )
        console.print(_sample(config), markup=False, soft_wrap=True)
        console.print()
    for line in summary(config, result):
        console.print(line, markup=False, soft_wrap=True)
    if not result.interrupted:
        console.print(_next_steps(args.model_dir), markup=False, soft_wrap=True)
    return INTERRUPTED if result.interrupted else 0


_INTRODUCTION = """\
Headwater demo: train a small GPT on the novel "Great Expectations".
The text is tokenized, the speed of this machine is measured (a few seconds, once), then the model trains.
"""


def _plan_in_words(plan: Plan, run: RunLength) -> str:
    """Return the decisions of the plan, explained to a newcomer."""
    stages, prediction = plan.trace.stages, plan.predicted
    weights = sum(stage.slab_bytes for stage in stages)
    limit = "" if plan.host_limit is None else f", {format_bytes(plan.host_limit)} available"
    lines = [
        f"model: {format_count(sum(stage.numel for stage in stages))} parameters in "
        f"{counted(len(stages), 'stage', 'stages')}, "
        f"{format_bytes(weights)} of weights; the device holds {plan.slabs} stages at a time",
        f"memory: {format_bytes(prediction.host_bytes)} predicted{limit}",
    ]
    if prediction.step_s is not None and run.steps is not None:
        step_s = prediction.step_s
        whole = f"{format_duration(step_s * run.steps)} for {counted(run.steps, 'step', 'steps')}"
        lines.append(f"time: {format_duration(step_s)} per step predicted, {whole}")
    return "\n".join([*lines, "the complete plan: plan.txt in the folder of the run", ""])


def _next_steps(model_dir: Path) -> str:
    """Return a text with commands to try after the demo."""
    # scripts/demo runs the command from .venv, which may not be on the user's PATH.
    command = "headwater" if shutil.which("headwater") else sys.argv[0]
    commands = {
        "generate text": f'generate --model_dir {model_dir} --prompt "It was"',
        "continue training": f"fit {model_dir} --max_steps 1200",
        "prepare your own text (then see docs/quickstart.md)": "data YOUR_BOOK.txt --out data/book",
        "plan a model that is larger than memory": (
            "plan gpt/cerebras_gpt_1p3b --host_memory 8GiB --disk scratch"
        ),
    }
    return "\nTry next:\n" + "".join(f"  # {what}\n  {command} {words}\n" for what, words in commands.items())


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
    """Return the statistics of the prepared data, which are created on the first call."""
    with importing("preparing text", "train"):
        from headwater.data.prepare import prepare
        from headwater.data.settings import PrepareSettings
        from headwater.data.statistics import FILE_NAME, read_statistics
        from headwater.data.tokenizer import TrainBPE
    if (folder / FILE_NAME).exists():
        return read_statistics(folder)
    model = language_model(config)
    return prepare(
        [sample_text()],
        folder,
        PrepareSettings(TrainBPE(model.vocab_size), model.max_position_embeddings),
        progress=console.is_terminal,
    )


def _sample(config: RunConfig) -> str:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    words = ["--model_dir", str(config.init.model_dir), "--prompt", _PROMPT, "--max_new_tokens", "80"]
    return generate.continued(config, parser.parse_args(words))
