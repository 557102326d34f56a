"""Params of a model of the user's own: strict where the package reads them, passed on where the user does.

They have the older form. `runconfig` and `optimizer` are required and follow the schema of every run.
`model`, `train_input` and `eval_input` are optional and hold what the user's model and data want; the package
itself reads `model.mixed_precision`, `model.fp16_type` and `train_input.micro_batch_size` in them.
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
from headwater.config.overrides import SHORT_NAMES, SOURCE, apply_overrides, parse_overrides, without_measures
from headwater.config.run import SetupConfig, read_section
from headwater.core.errors import ConfigError

_REQUIRED = {
    "runconfig": "max_steps, checkpoint_steps, log_steps and save_losses",
    "optimizer": "optimizer_type, learning_rate and loss_scaling_factor",
}
"""Sections that must be there, and what they usually hold."""

_READ_HERE = {
    "model": ("mixed_precision", "fp16_type"),
    "train_input": ("micro_batch_size",),
    "eval_input": (),
}
"""Sections of the user's own, and the keys in them that the package reads too."""


@dataclasses.dataclass(frozen=True)
class UserConfig:
    """A run of a model of the user's own.

    Attributes:
        init: how it is trained.
        params: every section as written, values of the command line included; a section that is not there is
            empty.
        checkpoint: where the run starts, if it is named.
        source: the file.
        notices: one line for each key that is accepted and has no effect.
    """

    init: SetupConfig
    params: dict[str, dict[str, Any]]
    checkpoint: Path | None
    source: Path
    notices: tuple[str, ...]


def load_user_params(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> UserConfig:
    """The run that the params file at `path` describes, whatever its model and data are.

    Args:
        path: a YAML file in the older form.
        overrides: `--num_steps=10`, `--model.width=8` or the same as a mapping.

    Raises:
        ConfigError: if a section that is required is missing, or one that the package reads is wrong.
    """
    source = Path(path)
    document = read_as_written(source)
    _check_sections(document, source)
    newer: dict[str, Any] = {}
    for flag, value in parse_overrides(overrides).items():
        key = _older_key(flag)
        if key[0] in OLDER_SECTIONS:
            document = put(without_measures(document, key), key, value, Origin(SOURCE, (flag,)))
        else:
            newer[flag] = value
    settings = apply_overrides(_settings(document), newer, ("trainer",))
    init, notices = read_section(SetupConfig, settings, ("trainer", "init"))
    params = {name: copy.deepcopy(document.tree.get(name) or {}) for name in OLDER_SECTIONS}
    return UserConfig(init, params, _checkpoint(document), source, notices)


def _check_sections(document: Document, source: Path) -> None:
    if "trainer" in document.tree:
        raise ConfigError(
            "a model of your own is run from params in the older form, and this file is in the newer one",
            where=str(document.origin(("trainer",))),
            remedy="write the sections runconfig and optimizer, and what your model needs in model",
        )
    for name, keys in _REQUIRED.items():
        if not document.tree.get(name):
            raise ConfigError(
                f"the params have no section {name!r}", where=str(source), remedy=f"add {name}, with {keys}"
            )
    for name in _READ_HERE:
        if not isinstance(document.tree.get(name) or {}, dict):
            raise ConfigError(
                f"expected a mapping of keys, found {document.tree[name]!r}",
                where=str(document.origin((name,))),
                remedy=f"write keys under {name}",
            )


def _older_key(flag: str) -> KeyPath:
    """The key that a flag stands for, in the older form where it has one there."""
    key = tuple((SHORT_NAMES[flag][0] if flag in SHORT_NAMES else flag).split("."))
    return OLDER_KEYS.get(key, key)


def _settings(document: Document) -> Document:
    """`document` with no more of the user's own sections than the package reads."""
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
            f"checkpoint_path is text, found {value!r}",
            where=str(document.origin(key)),
            remedy="write a path",
        )
    return None if value is None else expand_user(Path(value))
