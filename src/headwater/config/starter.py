"""The text of a new params file: short, commented, and based on a shipped file."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from headwater.config.base import JsonSchema, Section
from headwater.config.origins import KeyPath
from headwater.config.run import RunConfig

PrecisionName = Literal["fp32", "bf16", "fp16"]
PRECISIONS: Mapping[PrecisionName, Mapping[str, Any]] = {
    "fp32": {"enabled": False},
    "bf16": {"enabled": True, "fp16_type": "bfloat16"},
    "fp16": {"enabled": True, "fp16_type": "float16", "loss_scaling_factor": "dynamic"},
}
"""Section `precision` by the name of a precision."""
_LEARNING_RATE = {True: 2e-5, False: 3e-4}
"""Learning rate for a model of the transformers library: True if it has pretrained weights, else False."""
HF_DATA = {
    "causal_lm": "GptHDF5DataProcessor",
    "masked_lm": "BertHDF5DataProcessor",
    "sequence_classification": "BertHDF5DataProcessor",
}
"""Data processor of a model of the transformers library, by its task."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The content of a new params file.

    Attributes:
        base: name of the shipped file that it extends, or the folder of a model of the transformers library.
        model_dir: folder of the run.
        steps: number of training steps; `None` if `epochs` is set.
        epochs: number of passes over the data; `None` if `steps` is set.
        batch_size: samples per step.
        precision: precision of the run.
        model: model sizes that follow from the data.
        loaders: keys of the data loaders, by section (`train`, `val`); without validation data only `train`.
        backend: resource limits; empty to use all free memory.
    """

    base: str | Path
    model_dir: Path
    steps: int | None
    epochs: int | None
    batch_size: int
    precision: PrecisionName
    model: Mapping[str, Any]
    loaders: Mapping[str, Mapping[str, Any]]
    backend: Mapping[str, Any]


def start_text(start: Start, file: Path, schema_line: str | None) -> str:
    """Return the text of a new params file.

    Args:
        start: content of the file.
        file: path of the file, for the comments.
        schema_line: comment that names a JSON Schema, or `None`.
    """
    lines = [
        *([schema_line] if schema_line else []),
        f"# To print all values of this run and their origins: headwater config show {file}",
        *([] if isinstance(start.base, Path) else [f"extends: {start.base}  # model, optimizer, schedule"]),
        "trainer:",
        "  init:",
        f"    model_dir: {_flow(str(start.model_dir))}",
        *_model(start),
        f"    precision: {_flow(PRECISIONS[start.precision])}  # {start.precision}",
        f"    loop: {_flow(_loop(start))}",
        *_limits(start.backend),
        "  fit:",
        f"    train_dataloader: {_flow(start.loaders['train'])}",
    ]
    if "val" in start.loaders:
        loader = _flow(start.loaders["val"])
        lines += [f"    val_dataloader: {loader}", "  validate:", f"    val_dataloader: {loader}"]
    elif not isinstance(start.base, Path):
        lines += ["    val_dataloader: []  # there are no validation data", "  validate: null"]
    return "\n".join(lines) + "\n"


def _model(start: Start) -> Iterator[str]:
    if not isinstance(start.base, Path):
        if start.model:
            yield f"    model: {_flow(start.model)}  # sizes of the data"
        return
    has_weights = any(start.base.glob("*.safetensors")) or any(start.base.glob("pytorch_model*.bin"))
    yield f"    model: {_flow({'hf': str(start.base), **start.model})}"
    arguments = {"learning_rate": _LEARNING_RATE[has_weights], "weight_decay": 0.01}
    yield f"    optimizer: {_flow({'AdamW': arguments})}"


def _loop(start: Start) -> dict[str, int | None]:
    if start.epochs is None:
        return {"max_steps": start.steps}
    # The shipped file may set max_steps, which could end the run before the last pass.
    without = {} if isinstance(start.base, Path) else {"max_steps": None}
    return {**without, "num_epochs": start.epochs}


def _limits(backend: Mapping[str, Any]) -> Iterator[str]:
    if backend:
        yield f"    backend: {_flow(backend)}"
    else:
        yield "    # backend: {host_memory: 8GiB, disk: {path: scratch}}  # limits; default: all free memory"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(entry)}" for key, entry in value.items()) + "}"
    # In a list: YAML would end the text of a single value with `...`.
    text: str = yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.strip()[1:-1]


def schema_line(schema: Path) -> str:
    """Return the comment that tells an editor the schema of a params file in the same folder."""
    return f"# yaml-language-server: $schema={schema.name}"


def moved_folders(run: RunConfig, data: Path) -> dict[str, dict[str, Any]]:
    """Return the keys of a shipped run's data loaders that hold a path, with paths in the folder `data`.

    Paths keep their place relative to the common folder of the shipped run's data. Without a folder `train`
    in `data`, `data` itself is the training data, and the run has no validation data.

    Args:
        run: the shipped run.
        data: folder of the user's data.

    Returns:
        The keys by section, `train` and, with validation data, `val`.
    """
    assert run.fit is not None, "shipped files train"
    train, val = run.fit.train_dataloader, run.fit.val_dataloader
    sections = {"train": train, **({"val": val[0]} if val else {})}
    paths = {name: list(_paths(section, ())) for name, section in sections.items()}
    folders = [str(path) for found in paths.values() for key, path in found if _is_folder(key)]
    root = Path(os.path.commonpath(folders)) if folders else Path()
    if root.name in ("train", "val"):
        root = root.parent
    has_parts = any(path == root / "train" for _, path in paths["train"])
    whole = has_parts and data.is_dir() and not (data / "train").is_dir()
    moved = {}
    for name, found in paths.items():
        moved[name] = _nested(
            (key, data if whole and path == root / "train" else data / path.relative_to(root))
            for key, path in found
            if path.is_relative_to(root)
        )
    missing = whole or any(not path.exists() for path in _leaves(moved.get("val", {})))
    return {"train": moved["train"]} if missing and data.exists() else moved


def _is_folder(key: KeyPath) -> bool:
    return str(key[-1]).endswith("_dir") or key[-1] == "root"


def _paths(section: Section, location: KeyPath) -> Iterator[tuple[KeyPath, Path]]:
    """Yield the key and the value of each path in a data loader's section."""
    for key, name in section.attributes().items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _paths(value, (*location, key))
        elif isinstance(value, Path):
            yield (*location, key), value
        elif isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], Path):
            yield (*location, key), value[0]


def _nested(entries: Iterator[tuple[KeyPath, Path]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, path in entries:
        inside = tree
        for part in key[:-1]:
            inside = inside.setdefault(str(part), {})
        inside[str(key[-1])] = str(path)
    return tree


def _leaves(tree: JsonSchema) -> Iterator[Path]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield Path(value)
