"""`headwater checkpoint`: inspect, convert, export and import checkpoints."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from headwater.cli import convert
from headwater.cli.arguments import read_model_dir
from headwater.cli.parser import Parser
from headwater.config.files import find_params
from headwater.config.models import ModelConfig
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.run import RunConfig, load_params
from headwater.convert.adapters import export_adapters
from headwater.convert.checkpoint import export_hf, open_hf, read_config
from headwater.convert.folder import MODEL_FILE, read_model_section
from headwater.convert.model_zoo import zoo_readers
from headwater.convert.stored import stored_tensors
from headwater.core.errors import ConfigError, CorruptError, RunError
from headwater.core.mdl import is_mdl
from headwater.core.side_files import end_tokens, keep_generation_tokens, side_files
from headwater.core.units import format_bytes
from headwater.models.lora import is_adapter
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.checkpoint_inspection import complete_checkpoints, describe, find_damage
from headwater.trainer.comparison import is_folder_of_weights, model_of, tensors_of
from headwater.trainer.huggingface import export_library_model
from headwater.trainer.model_dir_lock import ModelDirLock
from headwater.trainer.pretrained import checkpoint_weights, import_weights
from headwater.trainer.run_dir import RunDir
from headwater.trainer.start import find_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater checkpoint`."""
    parser.description = "Inspect, convert, export and import checkpoints."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    info = commands.add_parser("info", help="print step, size and state of checkpoints")
    info.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a checkpoint, a model_dir, a folder in either format, or an .mdl file",
    )
    info.add_argument("--verify", action="store_true", help="check the checksums of all files")
    info.set_defaults(parser=info, action=run_info)

    export = commands.add_parser("export", help="write a model in Hugging Face's format")
    export.add_argument("--model_dir", required=True, type=Path, metavar="DIR", help="folder of the run")
    export.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new folder")
    export.add_argument(
        "--checkpoint_path", type=Path, metavar="PATH", help="checkpoint to export (the newest)"
    )
    export.add_argument(
        "--dtype", choices=convert.DTYPES, default="fp32", help="dtype of the files (%(default)s)"
    )
    export.add_argument(
        "--adapters", action="store_true", help="write only the adapters, in the format of the peft library"
    )
    export.set_defaults(parser=export, action=run_export)

    importer = commands.add_parser("import", help="create a run from weights")
    importer.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="folder that save_pretrained or headwater checkpoint convert has written, or an .mdl file of "
        "the Model Zoo",
    )
    importer.add_argument(
        "--model_dir", required=True, type=Path, metavar="DIR", help="folder of the new run"
    )
    importer.add_argument(
        "--params",
        metavar="PARAMS",
        help="params file with everything but the model; without it, a file to complete is written. For an "
        ".mdl file: the params file of its model",
    )
    importer.set_defaults(parser=importer, action=run_import)

    convert.add_commands(commands)


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return the exit code."""
    return int(args.action(args))


def run_info(args: argparse.Namespace) -> int:
    """Print a table of checkpoints and return the exit code, which is 1 if one of them is damaged."""
    if is_folder_of_weights(args.path) or is_mdl(args.path):
        return _show_folder(args.path, deep=args.verify)
    paths = complete_checkpoints(args.path) or [args.path]
    columns = ("checkpoint", "step", "parameters", "optimizer", "size")
    table = Table(*columns, "state", box=None, pad_edge=False)
    damaged = []
    for path in paths:
        damage = find_damage(path, deep=args.verify)
        if damage is not None:
            damaged.append(f"{path.name} is damaged: {damage}")
            table.add_row(path.name, *("-" * (len(columns) - 1)), "damaged")
            continue
        found = describe(path)
        size = format_bytes(found.num_bytes)
        state = "whole" if args.verify else "not verified"
        table.add_row(path.name, str(found.step), f"{found.num_parameters:,}", found.optimizer, size, state)
    Console(highlight=False).print(table)
    for line in damaged:
        print(line, file=sys.stderr)
    if args.verify and not damaged:
        print("all checksums are correct")
    return 1 if damaged else 0


def _show_folder(path: Path, *, deep: bool) -> int:
    """Print the content of a folder in Hugging Face's or Headwater's format, or of an .mdl file.

    Args:
        path: the folder or file.
        deep: true to read every tensor.
    """
    tensors, model = tensors_of(path), model_of(path)
    if deep:
        for tensor in tensors:
            tensor.read()
    table = Table("folder", "model", "tensors", "parameters", "dtype", "size", box=None, pad_edge=False)
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    size = format_bytes(sum(tensor.num_bytes for tensor in tensors))
    table.add_row(path.name, model, str(len(tensors)), f"{numbers:,}", ", ".join(dtypes), size)
    Console(highlight=False).print(table)
    if deep:
        print("every tensor was read; these files have no checksums")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write a folder that `AutoModelForCausalLM`, or `PeftModel` if it has adapters only, can load.

    Returns:
        The exit code.
    """
    config, run_dir = read_model_dir(args.model_dir), RunDir(args.model_dir)
    model, dtype = config.init.model, convert.DTYPES[args.dtype]

    def export(path: Path) -> None:
        if args.adapters:
            export_adapters(checkpoint_weights(path, is_adapter), model, args.out, dtype=dtype)
            return
        if isinstance(model, HuggingFaceConfig):
            export_library_model(path, model, args.out, dtype=dtype)
            return
        export_hf(
            checkpoint_weights(path),
            model,
            args.out,
            dtype=dtype,
            tokenizer_files=side_files(run_dir.path),
            end_of_text=_end_of_text(run_dir),
        )

    path = _newest_that(export, args.checkpoint_path, CheckpointManager(args.model_dir))
    print(f"{path} written to {args.out}")
    return 0


def _newest_that(use: Callable[[Path], None], named: Path | None, checkpoints: CheckpointManager) -> Path:
    """Use a checkpoint, and return its path: the named one, or the newest one that is not damaged.

    Args:
        use: reads the checkpoint; raises `CorruptError` if it is damaged.
        named: the checkpoint that the user names.
        checkpoints: the checkpoints of the run.
    """
    while True:
        path = find_trained(named, checkpoints, checkpoints.model_dir).path
        assert path is not None, "a checkpoint was found"
        try:
            use(path)
        except CorruptError as error:
            if named is not None:
                raise
            checkpoints.skip(path, error)
        else:
            return path


def _end_of_text(run_dir: RunDir) -> int | None:
    """Return the end-of-text token of the training data, or `None` if `generation_config.json` has one."""
    facts = run_dir.prepared_data()
    return None if facts is None or end_tokens(run_dir.path) else facts.end_of_text_id


def run_import(args: argparse.Namespace) -> int:
    """Create a model_dir with a checkpoint of step 0; return the exit code."""
    model, readers, parts = _weights(args.folder, args.params)
    with ModelDirLock(args.model_dir), tempfile.TemporaryDirectory() as scratch:
        if complete_checkpoints(args.model_dir):
            raise RunError(
                "this model_dir already contains a run",
                where=str(args.model_dir),
                remedy="name a new folder",
            )
        config = _config_with(model, args.params, Path(scratch), args.model_dir)
        path = import_weights(config, readers)
        run_dir = RunDir(args.model_dir)
        for part in parts:
            run_dir.keep_files_of(part)
        if not is_mdl(args.folder) and not (args.folder / MODEL_FILE).is_file():
            keep_generation_tokens(read_config(args.folder), run_dir.path)
        # The params are written last: only then is the folder the model_dir of a run.
        run_dir.write_params(config)
    print(f"{args.folder} imported to {path}; params in {run_dir.params}")
    return 0


_Weights = tuple[ModelConfig, Mapping[str, Callable[[], torch.Tensor]], Sequence[Path]]
"""A model, functions that read its parameters by name, and the folders with the files beside them."""


def _weights(source: Path, params: str | None) -> _Weights:
    """Return the weights of a folder in either format, or of a file of the Model Zoo.

    Args:
        source: the folder or file.
        params: the params file that the user names.
    """
    if is_mdl(source):
        return _zoo_weights(source, params)
    return _own_weights(source) if (source / MODEL_FILE).is_file() else _published_weights(source)


def _zoo_weights(path: Path, params: str | None) -> _Weights:
    """Return the weights of a file of the Model Zoo, which does not describe the model.

    Raises:
        ConfigError: if no params file is named.
    """
    if params is None:
        raise ConfigError(
            f"{path} does not contain the description of its model",
            where="--params",
            remedy="name the params file with which the model was trained: --params PARAMS.yaml",
        )
    model = convert.zoo_model(find_params(params))
    return model, zoo_readers(path, model), []


def _own_weights(folder: Path) -> _Weights:
    """Return the weights of a folder in Headwater's format."""
    readers = {stored.name: stored.read for stored in stored_tensors(folder)}
    return read_model_section(folder / MODEL_FILE), readers, [folder]


def _published_weights(folder: Path) -> _Weights:
    """Return the weights of a folder in Hugging Face's format. Print a notice if it lacks the head."""
    found = open_hf(folder)
    if found.drawn:
        print(f"note: {folder} has no head; initialised at random: {', '.join(found.drawn)}", file=sys.stderr)
    return found.config, found.readers(), [folder / part for part in (*found.format.folders, "")]


def _config_with(model: ModelConfig, params: str | None, scratch: Path, model_dir: Path) -> RunConfig:
    """Return the run of a params file with another model; without a file, a run whose data must be added.

    Args:
        model: the model.
        params: a params file or the name of a shipped one, or `None`.
        scratch: folder for temporary files.
        model_dir: folder of the run.
    """
    section = model.model_dump(exclude_unset=True) | {"name": model.name}
    tree = {"extends": str(find_params(params).absolute())} if params else {}
    init: dict[str, object] = {"model": section, "model_dir": str(model_dir)}
    if not params:
        init |= {"optimizer": {"AdamW": {"learning_rate": 1e-4}}, "loop": {"max_steps": 1000}}
    path = scratch / "params.yaml"
    path.write_text(yaml.safe_dump({**tree, "trainer": {"init": init}}))
    return load_params(path)
