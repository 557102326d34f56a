"""`headwater config init`: ask questions about a run, and write a params file for it."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from headwater.cli.interview import Interview, Question
from headwater.config.base import expand_user, nearest
from headwater.config.files import find_params, shipped_params
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.run import RunConfig, load_params
from headwater.config.starter import (
    HF_DATA,
    PRECISIONS,
    PrecisionName,
    Start,
    moved_folders,
    schema_line,
    start_text,
)
from headwater.core.errors import ConfigError
from headwater.core.files import check_place, obstacle_on
from headwater.core.units import counted, format_bytes, parse_bytes
from headwater.data.statistics import FILE_NAME, Statistics, read_statistics
from headwater.plan.machine import free_host_bytes

SCHEMA_FILE = "headwater.schema.json"
"""Name of the JSON Schema that a new params file refers to if it is in the same folder."""
_BASES = {
    "masked": "bert/tiny",
    "span_corruption": "t5/tiny",
    "classification": "bert/tiny_classification",
    "preference": "dpo/tiny",
    "embedding_pairs": "dpr/tiny",
    "extractive_summarization": "bert/tiny_scitldr",
    "image_text": "llava/tiny_coco",
}
"""The shipped params file on which the new one is based, by the mode in which the data were prepared."""
_BASE = "gpt/tiny"
_HF_BATCH = 8
_HF_EPOCHS = 1
_AUTO = "auto"
_NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater config init`."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("params.yaml"),
        metavar="FILE",
        help="file to write (%(default)s)",
    )
    parser.add_argument("--data", metavar="DIR", help="folder of the training data")
    parser.add_argument("--model", metavar="NAME", help="a model family, a shipped params file, or hf:FOLDER")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", metavar="N", help="training steps")
    length.add_argument("--epochs", metavar="N", help="passes over the training data")
    parser.add_argument("--batch_size", metavar="N", help="samples per step")
    parser.add_argument("--precision", metavar="NAME", help=", ".join(PRECISIONS))
    parser.add_argument("--host_memory", metavar="SIZE", help=f"limit such as 8GiB, or {_AUTO} (free memory)")
    parser.add_argument("--device_memory", metavar="SIZE", help="the same for GPU memory")
    parser.add_argument("--disk", metavar="DIR", help=f"folder for weights that exceed memory, or {_NONE}")
    parser.add_argument("--model_dir", metavar="DIR", help="folder of the run (runs/NAME)")
    parser.add_argument("--yes", action="store_true", help="do not ask; use the default of each question")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(args: argparse.Namespace) -> int:
    """Write a params file; return the exit code.

    Raises:
        ConfigError: if the file exists, its folder does not exist, an answer is wrong or missing, or the
            params would not be valid.
        RunError: if something that is not a file lies at the path, or this user may not write there.
    """
    file: Path = args.file
    if file.exists() and not args.force:
        raise ConfigError(
            "the file already exists",
            where=str(file),
            remedy="name a new file, or replace this one with --force",
        )
    # Before the questions, because an error after them would lose the answers.
    check_place(file, expected="a file")
    if not file.parent.is_dir():
        raise ConfigError(
            "the folder of the file does not exist",
            where=str(file),
            remedy="name a file in an existing folder to which you can write",
        )
    start = _ask_all(args)
    schema = file.parent / SCHEMA_FILE
    line = schema_line(schema) if schema.is_file() else None
    _write_valid(file, start_text(start, file, line))
    print(f"wrote {file}; next:\n  headwater plan {file}\n  headwater fit {file}")
    return 0


def _write_valid(file: Path, text: str) -> None:
    """Write a params file if its text is valid. Otherwise an existing file is not changed."""
    try:
        # The temporary folder is beside the file, because a rename must stay in one file system.
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}-") as folder:
            written = Path(folder) / file.name
            written.write_text(text, encoding="utf-8")
            try:
                load_params(written)
            except ConfigError as error:
                where = error.where and error.where.replace(str(written), str(file))
                raise ConfigError(error.what, where=where, remedy=error.remedy) from error
            written.replace(file)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}",
            where=str(file),
            remedy="name a file in an existing folder to which you can write",
        ) from error


def _ask_all(args: argparse.Namespace) -> Start:
    interview = Interview(takes_defaults=args.yes)
    question = Question("--data", "Folder of the training data", str(_found_data()), _data_folder)
    data = interview.ask(question, args.data)
    statistics = _statistics(data)
    if not data.exists():
        print(f"note: {data} does not exist yet; headwater data prepares it", file=sys.stderr)
    base = interview.ask(_model_question(statistics), args.model)
    shipped = None if isinstance(base, Path) else load_params(find_params(base))
    length = args.steps if args.epochs is None else f"{args.epochs} epochs"
    steps, epochs = interview.ask(_length_question(shipped), length)
    batch_size = interview.ask(_batch_question(shipped, statistics), args.batch_size)
    precision = interview.ask(_precision_question(shipped), args.precision)
    loaders = _hf_loaders(base, data) if isinstance(base, Path) else _shipped_loaders(shipped, data)
    return Start(
        base=base,
        model_dir=_model_dir(args),
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        precision=precision,
        model=_sizes(shipped, statistics, data),
        loaders={name: {**loader, "batch_size": batch_size} for name, loader in loaders.items()},
        backend=_limits(interview, args),
    )


def _found_data() -> Path:
    """Return the folder below `data` that was prepared last; `data` itself if it has no prepared folder."""
    found = sorted(Path("data").glob(f"*/{FILE_NAME}"), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else Path("data")


def _statistics(data: Path) -> Statistics | None:
    """Return the statistics that `headwater data` wrote, or `None` if it did not prepare `data`."""
    return read_statistics(data) if (data / FILE_NAME).is_file() else None


def _path(answer: str) -> Path:
    path: Path = expand_user(Path(answer))
    return path


def _model_dir(args: argparse.Namespace) -> Path:
    if args.model_dir is None:
        return Path("runs", args.file.stem)
    return _folder(args.model_dir, where="--model_dir", example="runs/book")


def _data_folder(answer: str) -> Path:
    return _folder(answer, where="--data", example="data/book")


def _folder(answer: str, *, where: str, example: str) -> Path:
    """Return the path of a folder that exists or can be created.

    Raises:
        ConfigError: if the answer is empty, or if the path, or the beginning of it, is a file.
    """
    if not answer.strip():
        raise ConfigError(
            "expected a folder, found an empty name", where=where, remedy=f"write for example {example}"
        )
    path = _path(answer)
    if (found := obstacle_on(path)) is not None and found[1] != "a folder":
        raise ConfigError(
            f"expected a folder, found {found[1]}: {found[0]}",
            where=where,
            remedy=f"write the path of a folder, for example {example}",
        )
    return path


def _model_question(statistics: Statistics | None) -> Question[str | Path]:
    families = dict.fromkeys(name.partition("/")[0] for name in shipped_params())
    text = f"Model: a family ({', '.join(families)}), a file of headwater config list, or hf:FOLDER"
    default = _BASE if statistics is None else _BASES.get(statistics.mode, _BASE)
    return Question("--model", text, default, _model)


def _model(answer: str) -> str | Path:
    """Return the name of a shipped file, or the folder of a model of the transformers library."""
    if answer.startswith("hf:"):
        return _path(answer.removeprefix("hf:").strip())
    shipped = shipped_params()
    sizes = [name for name in shipped if name.startswith(f"{answer}/")]
    if answer in shipped:
        return answer
    if f"{answer}/tiny" in sizes or len(sizes) == 1:
        return f"{answer}/tiny" if len(sizes) > 1 else sizes[0]
    if sizes:
        raise ConfigError(
            f"the family {answer} has several params files",
            where="--model",
            remedy=f"write one of {', '.join(sizes)}",
        )
    close = nearest(answer, [*shipped, *(name.partition("/")[0] for name in shipped)])
    remedy = "see headwater config list"
    raise ConfigError(
        f"unknown model family or params file {answer!r}",
        where="--model",
        remedy=f"write {close!r}; {remedy}" if close else remedy,
    )


def _length_question(shipped: RunConfig | None) -> Question[tuple[int | None, int | None]]:
    loop = None if shipped is None else shipped.init.loop
    if loop is None or loop.max_steps is None:
        default = counted(_HF_EPOCHS if loop is None else loop.num_epochs or 1, "epoch", "epochs")
    else:
        default = counted(loop.max_steps, "step", "steps")
    return Question(
        "--steps or --epochs", "Length of the run, for example 600 steps or 3 epochs", default, _length
    )


def _length(answer: str) -> tuple[int | None, int | None]:
    """Return (steps, epochs) as the user wrote the length of the run. One of them is `None`."""
    found = re.fullmatch(r"(\S+)(?: *(steps?|epochs?))?", answer)
    if found is None:
        raise ConfigError(
            f"expected a number of steps or epochs, found {answer!r}",
            where="length of the run",
            remedy="write for example 600 steps or 3 epochs",
        )
    number = _count(found[1], "length of the run")
    return (None, number) if (found[2] or "").startswith("epoch") else (number, None)


def _count(answer: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", answer) or int(answer) == 0:
        raise ConfigError(
            f"expected an integer > 0, found {answer!r}", where=where, remedy="write for example 16"
        )
    return int(answer)


def _batch_question(shipped: RunConfig | None, statistics: Statistics | None) -> Question[int]:
    usual = _HF_BATCH if shipped is None or shipped.fit is None else shipped.fit.train_dataloader.batch_size
    if statistics is not None:
        usual = min(usual, max(1, statistics.train_samples))
    return Question("--batch_size", "Samples per step", str(usual), lambda text: _count(text, "--batch_size"))


def _precision_question(shipped: RunConfig | None) -> Question[PrecisionName]:
    default = "fp32" if shipped is None else shipped.init.precision.precision.name
    return Question("--precision", f"Precision ({', '.join(PRECISIONS)})", default, _precision)


def _precision(answer: str) -> PrecisionName:
    for name in PRECISIONS:
        if answer == name:
            return name
    raise ConfigError(
        f"expected {' or '.join(PRECISIONS)}, found {answer!r}",
        where="--precision",
        remedy="write one of them",
    )


def _limits(interview: Interview, args: argparse.Namespace) -> dict[str, Any]:
    """Return the section `backend` with the resource limits that the user has chosen."""
    free = format_bytes(free_host_bytes())
    host = Question(
        "--host_memory",
        f"Host memory, for example 8GiB ({_AUTO}: free memory, {free} now)",
        _AUTO,
        _size,
    )
    limits: dict[str, Any] = {"host_memory": interview.ask(host, args.host_memory)}
    if torch.cuda.is_available() or args.device_memory is not None:
        device = Question("--device_memory", f"GPU memory ({_AUTO}: free memory)", _AUTO, _size)
        limits["device_memory"] = interview.ask(device, args.device_memory)
    text = f"Folder for weights that do not fit in memory ({_NONE}: keep them in memory)"
    disk = interview.ask(Question("--disk", text, _NONE, _disk), args.disk)
    limits["disk"] = None if disk is None else {"path": disk}
    return {key: value for key, value in limits.items() if value is not None}


def _disk(answer: str) -> str | None:
    """Return the folder of the disk tier as the user wrote it, or `None` for `none`."""
    if answer == _NONE:
        return None
    _folder(answer, where="--disk", example=f"scratch, or {_NONE}")
    return answer


def _size(answer: str) -> str | None:
    """Return the memory size as the user wrote it, or `None` for `auto`."""
    if answer == _AUTO:
        return None
    if parse_bytes(answer) < 1:
        raise ConfigError(
            f"expected at least 1 byte, found {answer!r}",
            where="size of memory",
            remedy=f"write for example 8GiB, or {_AUTO}",
        )
    return answer


def _sizes(shipped: RunConfig | None, statistics: Statistics | None, data: Path) -> dict[str, int]:
    """Return the model sizes that the data determine and that differ from those of the shipped file.

    Args:
        shipped: run of the shipped params file, if there is one.
        statistics: statistics of the data, if `headwater data` prepared them.
        data: folder of the data.
    """
    if shipped is None or statistics is None:
        return {}
    from headwater.data.tokenizer import load_tokenizer  # imports an optional library

    tokens = max(statistics.vocab_size, load_tokenizer(data / statistics.tokenizer_file).get_vocab_size())
    wanted = {"vocab_size": tokens, "max_position_embeddings": statistics.sequence_length}
    names = statistics.settings.get("options", {}).get("labels")
    wanted |= {"num_labels": len(names)} if names else {}
    given = {key: getattr(shipped.init.model, key, None) for key in wanted}
    return {key: value for key, value in wanted.items() if given[key] not in (None, value)}


def _shipped_loaders(shipped: RunConfig | None, data: Path) -> dict[str, dict[str, Any]]:
    assert shipped is not None, "the model is that of a shipped params file"
    return moved_folders(shipped, data)


def _hf_loaders(folder: Path, data: Path) -> dict[str, dict[str, Any]]:
    """Return the data loaders for a model of the transformers library.

    Args:
        folder: folder of the model.
        data: folder of the data.

    Raises:
        ConfigError: if the folder has no such model, or its task is not among those of `HF_DATA`.
    """
    try:
        task = HuggingFaceConfig(name="hf", hf=folder).kind
    except ValidationError as error:
        raise ConfigError(
            f"expected a folder with the config.json of a transformers model, found {folder}",
            where="--model",
            remedy="write hf:FOLDER",
        ) from error
    if task not in HF_DATA:
        raise ConfigError(
            f"{folder} is a model for {task}, for which init cannot write the data settings",
            where="--model",
            remedy=f"write the file by hand (docs/models.md); init supports {', '.join(HF_DATA)}",
        )
    parts = {name: data / name for name in ("train", "val") if (data / name).is_dir()}
    parts = parts if "train" in parts else {"train": data}
    shuffle = {"train": True, "val": False}
    return {
        name: {"data_processor": HF_DATA[task], "data_dir": str(part), "shuffle": shuffle[name]}
        for name, part in parts.items()
    }
