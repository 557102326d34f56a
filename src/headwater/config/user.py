"""Params files for a model that the user has written. They have the older form.

`runconfig` and `optimizer` are required, and are validated as in every run. `model`, `train_input` and
`eval_input` are optional, and are passed to the user's functions without validation. Headwater itself reads
only `model.mixed_precision`, `model.fp16_type` and `train_input.micro_batch_size` in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.config.base import expand_user
from headwater.config.document import Document, put
from headwater.config.files import read_as_written
from headwater.config.forms import OLDER_KEYS, OLDER_SECTIONS, canonical
from headwater.config.origins import KeyPath, Origin
from headwater.config.overrides import (
    SHORT_NAMES,
    SOURCE,
    apply_overrides,
    parse_overrides,
    without_replaced_lengths,
)
from headwater.config.run import CommonInitConfig, read_section
from headwater.core.errors import ConfigError

_REQUIRED = {
    "runconfig": "max_steps, checkpoint_steps, log_steps and save_losses",
    "optimizer": "optimizer_type, learning_rate and loss_scaling_factor",
}
"""Required sections, with their usual keys."""

_READ_HERE = {
    "model": ("mixed_precision", "fp16_type"),
    "train_input": ("micro_batch_size",),
    "eval_input": (),
}
"""Sections that the user's functions read -> the keys in these sections that Headwater reads too."""


@dataclasses.dataclass(frozen=True)
class UserConfig:
    """A run of a model that the user has written.

    Attributes:
        init: training settings.
        params: all sections as written, with the values of the command line; missing sections are empty.
        checkpoint: checkpoint with which the run starts, if the params name one.
        source: the params file.
        notices: a line for each key without effect.
    """

    init: CommonInitConfig
    params: dict[str, dict[str, Any]]
    checkpoint: Path | None
    source: Path
    notices: tuple[str, ...]


def load_user_params(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> UserConfig:
    """Read a run of the user's model from a params file.

    Args:
        path: a YAML file in the older form.
        overrides: values that replace those of the file: `--num_steps=10`, `--model.width=8`, or the same as
            a mapping.

    Raises:
        ConfigError: if a required section is missing, or a validated section is not valid.
    """
    source = Path(path)
    document = read_as_written(source)
    _check_sections(document, source)
    newer: dict[str, Any] = {}
    for flag, value in parse_overrides(overrides).items():
        key = _older_key(flag)
        if key[0] in OLDER_SECTIONS:
            document = put(without_replaced_lengths(document, key), key, value, Origin(SOURCE, (flag,)))
        else:
            newer[flag] = value
    settings = apply_overrides(_settings(document), newer, ("trainer",))
    init, notices = read_section(CommonInitConfig, settings, ("trainer", "init"))
    # A copy, because the user's functions may change it.
    params = {name: copy.deepcopy(document.tree.get(name) or {}) for name in OLDER_SECTIONS}
    return UserConfig(init, params, _checkpoint(document), source, notices)


def _check_sections(document: Document, source: Path) -> None:
    if "trainer" in document.tree:
        raise ConfigError(
            "expected params in the older form for a user's model, got the newer form (section trainer)",
            where=str(document.origin(("trainer",))),
            remedy="write the sections runconfig and optimizer, and the settings of your model in model",
        )
    for name, keys in _REQUIRED.items():
        if not document.tree.get(name):
            raise ConfigError(
                f"the section {name!r} is missing", where=str(source), remedy=f"add {name}, with {keys}"
            )
    for name in _READ_HERE:
        if not isinstance(document.tree.get(name) or {}, dict):
            raise ConfigError(
                f"expected a mapping of keys, found {document.tree[name]!r}",
                where=str(document.origin((name,))),
                remedy=f"write keys under {name}",
            )


def _older_key(flag: str) -> KeyPath:
    """Return the path of the key that a flag sets: in the older form, or else in the newer form."""
    key = tuple((SHORT_NAMES[flag][0] if flag in SHORT_NAMES else flag).split("."))
    return OLDER_KEYS.get(key, key)


def _settings(document: Document) -> Document:
    """Return the params that Headwater reads, in the newer form. Other keys are for the user's functions."""
    tree = {name: section for name, section in document.tree.items() if name not in _READ_HERE}
    for name, keys in _READ_HERE.items():
        section = document.tree.get(name) or {}
        if read := {key: section[key] for key in keys if key in section}:
            tree[name] = read
    result = canonical(Document(tree, document.origins))
    init = {key: value for key, value in result.tree["trainer"]["init"].items() if key != "model"}
    return Document({"trainer": {"init": init}}, result.origins, result.notices)


def _checkpoint(document: Document) -> Path | None:
    key = ("runconfig", "checkpoint_path")
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"expected checkpoint_path to be text, got {value!r}",
            where=str(document.origin(key)),
            remedy="write a path",
        )
    return None if value is None else expand_user(Path(value))
