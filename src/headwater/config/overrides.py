"""Values on the command line that replace those of a params file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.config.base import nearest
from headwater.config.document import Document, put, remove
from headwater.config.forms import OLDER_SECTIONS
from headwater.config.origins import KeyPath, Origin, dotted
from headwater.config.rates import set_learning_rate
from headwater.config.yaml_reader import parse_scalar
from headwater.core.errors import ConfigError

SHORT_NAMES: dict[str, tuple[str, ...]] = {
    "num_steps": ("trainer.init.loop.num_steps",),
    "max_steps": ("trainer.init.loop.max_steps",),
    "epochs": ("trainer.init.loop.num_epochs",),
    "learning_rate": ("trainer.init.schedulers",),
    "lr": ("trainer.init.schedulers",),
    "data_dir": ("trainer.fit.train_dataloader.data_dir",),
    "eval_steps": ("trainer.init.loop.eval_steps",),
    "eval_frequency": ("trainer.init.loop.eval_frequency",),
    "model": ("trainer.init.model.name",),
    "model_dir": ("trainer.init.model_dir",),
    "seed": ("trainer.init.seed",),
    "num_csx": ("trainer.init.backend.cluster_config.num_csx",),
    "num_memx": ("trainer.init.backend.cluster_config.num_memx",),
    "max_restarts": ("trainer.init.backend.cluster_config.max_restarts",),
    "target_device": ("trainer.init.backend.backend_type",),
    "device_memory": ("trainer.init.backend.device_memory",),
    "host_memory": ("trainer.init.backend.host_memory",),
    "disk": ("trainer.init.backend.disk.path",),
    "compile_dir": ("trainer.init.backend.compile_dir",),
    "micro_batch_size": ("trainer.init.backend.micro_batch_size",),
    "batch_size": ("trainer.fit.train_dataloader.batch_size",),
    "checkpoint_steps": ("trainer.init.checkpoint.steps",),
    "autoload_last_checkpoint": ("trainer.init.checkpoint.autoload_last_checkpoint",),
    "log_steps": ("trainer.init.logging.log_steps",),
    "job_labels": ("trainer.init.backend.cluster_config.job_labels",),
    "job_priority": ("trainer.init.backend.cluster_config.job_priority",),
    "checkpoint_path": ("trainer.fit.ckpt_path", "trainer.validate.ckpt_path"),
}
"""Flag -> paths of the keys that it sets. Of several keys, only those in an existing section are set."""

SOURCE = "command line"
RATES = ("learning_rate", "lr")
_LENGTH_KEYS = ("max_steps", "num_steps", "num_epochs")
_LOOPS: tuple[KeyPath, ...] = (("trainer", "init", "loop"), ("runconfig",))
"""Paths of the sections that can contain the length of a run, in the newer and the older form."""


def parse_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Parse values on the command line; return name or path of the key -> value.

    Args:
        overrides: strings `--key=value` (the dashes are optional), or a mapping.

    Raises:
        ConfigError: if a string has no `=`, or a key is neither a short name nor a path.
    """
    if not isinstance(overrides, Mapping):
        overrides = dict(_split(text) for text in overrides)
    for key in overrides:
        section = key.split(".")[0]
        if key not in SHORT_NAMES and ("." not in key or section not in ("trainer", *OLDER_SECTIONS)):
            close = nearest(key, SHORT_NAMES)
            listed = f"short names: {', '.join(sorted(SHORT_NAMES))}; or write a path, trainer.init.…"
            raise ConfigError(
                f"unknown flag {key!r}",
                where=SOURCE,
                remedy=f"write {close!r}; {listed}" if close else listed,
            )
    return dict(overrides)


def apply_overrides(document: Document, overrides: Mapping[str, Any], sections: Sequence[str]) -> Document:
    """Return `document` with overrides applied.

    Args:
        document: the document.
        overrides: values by flag.
        sections: top-level sections; overrides of keys in other sections are skipped.

    Raises:
        ConfigError: if a learning rate is not a number > 0, or a path contains an invalid list position.
    """
    for flag, value in overrides.items():
        for path in _paths(flag, document):
            if path[0] not in sections:
                continue
            origin = Origin(SOURCE, (flag,))
            if flag in RATES:
                document = set_learning_rate(document, value, origin)
            else:
                document = without_replaced_lengths(document, path)
                document = put(document, path, value, origin)
    if "data_dir" in overrides and "trainer" in sections:
        return _with_notice_of_other_data(document)
    return document


def _with_notice_of_other_data(document: Document) -> Document:
    """Add a notice if the params name validation data, which `--data_dir` does not change."""
    others = []
    for section in ("fit", "validate"):
        path: KeyPath = ("trainer", section, "val_dataloader", "data_dir")
        folder = document.get(path)
        if folder is not None and document.origin(path).source != SOURCE:
            others.append(f"{dotted(path[:-1])} reads {folder}")
    if not others:
        return document
    return document.with_notice(
        f"--data_dir only sets trainer.fit.train_dataloader; {', '.join(others)}; "
        "use KEY.data_dir=FOLDER to set another folder there"
    )


def without_replaced_lengths(document: Document, path: KeyPath) -> Document:
    """If the command line sets the length of the run at `path`, remove the lengths that the file sets."""
    if path[-1] not in _LENGTH_KEYS or path[:-1] not in _LOOPS:
        return document
    # The run ends at the first limit: a limit of the file could end it before the one that the user asks for.
    for key in _LENGTH_KEYS:
        old = (*path[:-1], key)
        if document.get(old) is not None and document.origin(old).source != SOURCE:
            document = remove(document, old)
    return document


def _paths(flag: str, document: Document) -> list[KeyPath]:
    if flag not in SHORT_NAMES:
        return [tuple(flag.split("."))]
    paths: list[KeyPath] = [tuple(path.split(".")) for path in SHORT_NAMES[flag]]
    return paths if len(paths) == 1 else [path for path in paths if document.get(path[:-1]) is not None]


def _split(text: str) -> tuple[str, Any]:
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals:
        raise ConfigError(f"expected key=value, got {text!r}", where=SOURCE, remedy=f"write --{key}=VALUE")
    return key, parse_scalar(value)
