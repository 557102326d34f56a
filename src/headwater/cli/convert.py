"""`headwater checkpoint convert`, `list-converters` and `diff`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headwater.cli.parser import Parser
from headwater.config.models import ModelConfig
from headwater.config.run import read_run
from headwater.convert.checkpoint import export_hf, open_hf, parameter_shapes
from headwater.convert.folder import MODEL_FILE, read_folder, read_model_section, write_folder
from headwater.convert.formats import CONVERTERS, nearest_converter
from headwater.convert.formats.base import Format
from headwater.convert.model_zoo import check_defaults, zoo_readers
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.mdl import is_mdl
from headwater.core.side_files import side_files
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.comparison import compare
from headwater.trainer.pretrained import checkpoint_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HF, _OWN = "hf", "headwater"
_RELEASE = re.compile(r"cs-\d+\.\d+")
"""Names of the Model Zoo's checkpoint formats, by release. They mean its own format if IN is such a file, and
otherwise Headwater's format."""


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands to those of `headwater checkpoint`."""
    convert = commands.add_parser("convert", help="convert between Hugging Face's and Headwater's format")
    convert.add_argument("--model", required=True, metavar="MODEL", help="see list-converters")
    formats = "hf, headwater; cs-X.Y means headwater, or the format of IN if IN is an .mdl file"
    convert.add_argument(
        "--src-fmt", required=True, type=_format, metavar="FORMAT", help=f"format of IN: {formats}"
    )
    convert.add_argument(
        "--tgt-fmt",
        required=True,
        type=_format,
        metavar="FORMAT",
        help="format of OUT: hf, headwater; cs-X.Y means headwater",
    )
    convert.add_argument(
        "--config", type=Path, metavar="FILE", help="config.json or params file (that in the folder IN)"
    )
    convert.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of the files (%(default)s)")
    convert.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="folder in which OUT is created as IN_to_FORMAT"
    )
    convert.add_argument(
        "input", type=Path, metavar="IN", help="a folder, a file in it, or an .mdl file of the Model Zoo"
    )
    convert.add_argument(
        "output", type=Path, metavar="OUT", nargs="?", help="new folder; or give --output-dir"
    )
    convert.set_defaults(parser=convert, action=run_convert)

    listing = commands.add_parser("list-converters", help="list the models that can be converted")
    listing.set_defaults(parser=listing, action=run_list)

    diff = commands.add_parser("diff", help="compare two checkpoints, tensor by tensor")
    diff.add_argument(
        "first", type=Path, metavar="A", help="a folder in either format, a checkpoint, or a run's model_dir"
    )
    diff.add_argument("second", type=Path, metavar="B", help="the same")
    diff.set_defaults(parser=diff, action=run_diff)


def _format(word: str) -> str:
    """Return the name of a format unchanged, or raise if it is unknown. `_meant` says which format it is."""
    if word in (_HF, _OWN) or _RELEASE.fullmatch(word):
        return word
    raise argparse.ArgumentTypeError(f"expected hf, headwater or cs-X.Y, found {word!r}")


def _meant(format: str) -> str:
    return _HF if format == _HF else _OWN


def run_convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint, one tensor at a time; return the exit code."""
    if args.model not in CONVERTERS:
        close = nearest_converter(args.model)
        listed = f"available: {', '.join(CONVERTERS)}"
        raise ConfigError(
            f"no converter for the model {args.model!r}",
            where="--model",
            remedy=f"write {close}; {listed}" if close else listed,
        )
    source, target, is_zoo = _meant(args.src_fmt), _meant(args.tgt_fmt), is_mdl(args.input)
    if is_zoo and source == _HF:
        raise ConfigError(
            f"{args.input} is a file of the Model Zoo, not a checkpoint in Hugging Face's format",
            where="--src-fmt",
            remedy="write --src-fmt cs-2.2, or another release",
        )
    if source == target and not is_zoo:
        raise ConfigError(
            f"source and target format are both {source}"
            if args.src_fmt == args.tgt_fmt
            else f"{args.src_fmt} and {args.tgt_fmt} both mean the format {source}",
            where="--tgt-fmt",
            remedy="IN needs no conversion; for another format write another --tgt-fmt",
        )
    if not args.input.exists():
        raise CheckpointError("the checkpoint does not exist", where=str(args.input), remedy="check the path")
    format, model = CONVERTERS[args.model]
    folder = args.input if args.input.is_dir() else args.input.parent
    output, dtype = _output(args), DTYPES[args.dtype]
    config: ModelConfig
    if is_zoo:
        config, tensors = _zoo(args.input, args.config, format, model)
    elif source == _HF:
        found = open_hf(folder, config_file=args.config, format=format)
        config, tensors = found.config, found.tensors()
    else:
        config, tensors = _own(folder, args.config, format, model)
    beside = side_files(folder)
    if target == _HF:
        export_hf(tensors, config, output, format=format, dtype=dtype, tokenizer_files=beside)
    else:
        write_folder(tensors, parameter_shapes(config), config, output, dtype=dtype, beside=beside)
    print(f"{args.input if is_zoo else folder} converted to {output}")
    return 0


def _output(args: argparse.Namespace) -> Path:
    """Return the path of the folder to create.

    Raises:
        ConfigError: unless exactly one of OUT and --output-dir is given.
    """
    if (args.output is None) == (args.output_dir is None):
        given = "both" if args.output else "neither"
        raise ConfigError(
            f"expected OUT or --output-dir, found {given}", where="OUT", remedy="write one of the two"
        )
    if args.output is not None:
        return Path(args.output)
    stem = args.input.name if args.input.is_dir() else args.input.stem
    return Path(args.output_dir / f"{stem}_to_{args.tgt_fmt}")


def _own(
    folder: Path, config_file: Path | None, format: Format, model: str
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """Return the model and its weights from a folder in Headwater's format, or from a checkpoint of a run.

    Args:
        folder: the folder or checkpoint.
        config_file: params file with the model, if the folder's own is not to be used.
        format: format of `--model`.
        model: name of `--model`.

    Raises:
        ConfigError: if the folder contains another model than `--model` names.
    """
    if (folder / MODEL_FILE).is_file():
        config, tensors = read_folder(folder)
        config = read_model_section(config_file) if config_file else config
    else:
        params = config_file or folder.parent / "params.yaml"
        config, tensors = read_model_section(params), checkpoint_weights(folder)
    _check_model(config, format, model, config_file or folder)
    return config, tensors


def _zoo(
    path: Path, config_file: Path | None, format: Format, model: str
) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """Return the model and its weights from a file of the Model Zoo; the arguments are those of `_own`.

    Raises:
        ConfigError: if the params file is missing, or contains another model than `--model` names.
    """
    if config_file is None:
        raise ConfigError(
            f"{path} does not contain the description of its model",
            where="--config",
            remedy="name the params file with which the model was trained: --config PARAMS.yaml",
        )
    config = zoo_model(config_file)
    _check_model(config, format, model, config_file)
    return config, ((name, read()) for name, read in zoo_readers(path, config).items())


def zoo_model(params: Path) -> ModelConfig:
    """Return the model of a params file with which the Model Zoo has trained.

    Raises:
        ConfigError: if the file is not valid, or lacks a key whose default differs.
    """
    run, document, _ = read_run(params)
    check_defaults(run.init.model, document.get(("trainer", "init", "model")), where=str(params))
    return run.init.model


def _check_model(config: ModelConfig, format: Format, model: str, where: Path) -> None:
    if config.name not in format.models and config.name != model:
        raise ConfigError(
            f"expected a model that --model {model} converts, found {config.name}",
            where=str(where),
            remedy=f"convert it with --model {config.name}"
            if config.name in CONVERTERS
            else "use headwater checkpoint export, which can write this model",
        )


def run_list(args: argparse.Namespace) -> int:
    """Print a table of the converters; return the exit code."""
    table = _table("model", "class of the transformers library", "model here")
    for name, (format, model) in CONVERTERS.items():
        table.add_row(name, format.architecture, model)
    Console(highlight=False).print(table)
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Print the differences of two checkpoints and a summary; return 0 if they are equal, otherwise 1."""
    found = compare(_newest(args.first), _newest(args.second))
    table = _table("tensor", "difference")
    for each in found.differences:
        table.add_row(each.name, each.what)
    if found.differences:
        Console(highlight=False).print(table)
    print(found.summary)
    return 1 if found.differences else 0


def _newest(path: Path) -> Path:
    """Return the newest checkpoint of a run's folder; return any other path unchanged."""
    found = complete_checkpoints(path)
    if not found:
        return path
    print(f"{path}: comparing {found[-1].name}")
    return found[-1]


def _table(*columns: str) -> Table:
    """Return an empty table whose cells are never shortened: the reader copies names from it."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    return table
