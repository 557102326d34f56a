"""`headwater checkpoint convert`, `list-converters` and `diff`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headwater.cli.parser import Parser, suggestion
from headwater.config import ModelConfig
from headwater.convert.checkpoint import export_hf, import_hf, parameter_shapes
from headwater.convert.folder import MODEL_FILE, read_folder, read_model_section, write_folder
from headwater.convert.formats import CONVERTERS
from headwater.convert.formats.base import Format
from headwater.convert.shards import weight_files
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.safetensors import TensorFile
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.snapshot_manifest import MANIFEST_FILE
from headwater.trainer.pretrained import checkpoint_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("hf", "headwater")


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the commands to those of `headwater checkpoint`."""
    convert = commands.add_parser("convert", help="from Hugging Face's format to ours, or back")
    convert.add_argument("--model", required=True, metavar="MODEL", help="see list-converters")
    convert.add_argument("--src-fmt", required=True, choices=FORMATS, help="format of IN")
    convert.add_argument("--tgt-fmt", required=True, choices=FORMATS, help="format of OUT")
    convert.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json, or params; that of IN if not given"
    )
    convert.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the files (%(default)s)")
    convert.add_argument("input", type=Path, metavar="IN", help="a folder, or a file in it")
    convert.add_argument("output", type=Path, metavar="OUT", help="new folder")
    convert.set_defaults(parser=convert, action=run_convert)

    listing = commands.add_parser("list-converters", help="models that can be converted")
    listing.set_defaults(parser=listing, action=run_list)

    diff = commands.add_parser("diff", help="compare two checkpoints, tensor by tensor")
    diff.add_argument(
        "first", type=Path, metavar="A", help="a folder in either format, or a checkpoint of a run"
    )
    diff.add_argument("second", type=Path, metavar="B", help="likewise")
    diff.set_defaults(parser=diff, action=run_diff)


def run_convert(args: argparse.Namespace) -> int:
    """Converts a checkpoint, one tensor at a time; returns the exit code."""
    if args.model not in CONVERTERS:
        raise ConfigError(
            f"there is no converter for {args.model!r}",
            where="--model",
            remedy=suggestion(args.model, CONVERTERS, f"models are: {', '.join(CONVERTERS)}"),
        )
    if args.src_fmt == args.tgt_fmt:
        raise ConfigError(
            f"both formats are {args.src_fmt}", where="--tgt-fmt", remedy="convert to the other format"
        )
    if not args.input.exists():
        raise CheckpointError("there is no such folder", where=str(args.input), remedy="name a checkpoint")
    format, model = CONVERTERS[args.model]
    folder = args.input if args.input.is_dir() else args.input.parent
    if args.src_fmt == "hf":
        config, tensors = import_hf(folder, config_file=args.config, format=format)
        write_folder(tensors, parameter_shapes(config), config, args.output, dtype=DTYPES[args.dtype])
    else:
        config, tensors = _own(folder, args.config, format, model)
        export_hf(tensors, config, args.output, format=format, dtype=DTYPES[args.dtype])
    print(f"{folder} converted to {args.output}")
    return 0


def _own(
    folder: Path, config_file: Path | None, format: Format, model: str
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """The model and its weights in a folder of our format, or in a checkpoint of a run."""
    if (folder / MODEL_FILE).is_file():
        config, tensors = read_folder(folder)
        config = read_model_section(config_file) if config_file else config
    else:
        params = config_file or folder.parent / "params.yaml"
        config, tensors = read_model_section(params), checkpoint_weights(folder)
    if config.name not in format.models and config.name != model:
        raise ConfigError(
            f"the model is a {config.name}",
            where=str(config_file or folder),
            remedy=f"convert it with --model {config.name}"
            if config.name in CONVERTERS
            else "write it with headwater checkpoint export, which knows what of it to write",
        )
    return config, tensors


def run_list(args: argparse.Namespace) -> int:
    """Prints a table; returns the exit code."""
    table = Table("model", "class of the transformers library", "model here", box=None, pad_edge=False)
    for name, (format, model) in CONVERTERS.items():
        table.add_row(name, format.architecture, model)
    Console(highlight=False).print(table)
    return 0


@dataclasses.dataclass(frozen=True)
class Difference:
    """What two checkpoints do not have in common.

    Attributes:
        name: of the tensor.
        what: what differs.
    """

    name: str
    what: str


def run_diff(args: argparse.Namespace) -> int:
    """Prints what differs; returns 0 if nothing does, and otherwise 1."""
    table = Table("tensor", "difference", box=None, pad_edge=False)
    found = list(differences(args.first, args.second))
    for each in found:
        table.add_row(each.name, each.what)
    if found:
        Console(highlight=False).print(table)
        return 1
    print("the checkpoints are the same, bit for bit")
    return 0


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """What differs between two checkpoints; a tensor of each is in memory at a time.

    Raises:
        CheckpointError: if one of them cannot be read.
    """
    ours, others = _tensors(first), _tensors(second)
    for name, file in ours.items():
        if name not in others:
            yield Difference(name, f"only in {first}")
            continue
        tensor, other = file.read_whole(name), others[name].read_whole(name)
        if other.shape != tensor.shape:
            yield Difference(name, f"shapes {list(tensor.shape)} and {list(other.shape)}")
        elif not torch.equal(tensor, other):
            largest = (tensor.double() - other.double()).abs().max().item()
            yield Difference(name, f"values, by up to {largest:.3g}")
    for name in others:
        if name not in ours:
            yield Difference(name, f"only in {second}")


def _tensors(path: Path) -> dict[str, TensorFile]:
    """The file that holds each tensor of a checkpoint in whatever format."""
    own = (path / MANIFEST_FILE).is_file()
    files = SavedCheckpoint(path).weights() if own else [TensorFile(file) for file in weight_files(path)]
    return {name: file for file in files for name in file.places}
