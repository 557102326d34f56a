"""The keys of params files by their last name, for the remedy of an option that a command does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from headwater.config.base import Choice, Section, nearest
from headwater.config.overrides import SHORT_NAMES
from headwater.config.run import TrainerConfig

_MOST_PATHS = 2
"""Paths of a key that a remedy lists. For example, models and some dataloaders have a `vocab_size`."""
_INIT = "trainer.init."


def meant_key(name: str, options: Iterable[str]) -> str | None:
    """Return what to write instead of an unknown option: an option, or the path of a key.

    Args:
        name: the unknown option, without dashes.
        options: the options of the command, without dashes.

    Returns:
        `--max_steps`, or for example `trainer.init.model.vocab_size=VALUE`; `None` if nothing has a similar
        name.
    """
    own, paths = list(options), key_paths()
    # An exact key before a similar option: `vocab_size` must not become `batch_size`.
    close = name if name in paths else nearest(name, [*own, *paths])
    if close is None:
        return None
    if close in own:
        return f"--{close}"
    chosen = sorted(paths[close], key=lambda path: (not path.startswith(_INIT), path.count("."), path))
    return " or ".join(f"{path}=VALUE" for path in chosen[:_MOST_PATHS])


def key_paths() -> Mapping[str, tuple[str, ...]]:
    """Return last name -> paths, for each key that a command line can set by its path."""
    found: dict[str, dict[str, None]] = {}
    for path in _paths(TrainerConfig, "trainer"):
        found.setdefault(path.rpartition(".")[2], {})[path] = None
    return {name: tuple(paths) for name, paths in found.items() if name not in SHORT_NAMES}


def _paths(section: type[Section], above: str) -> Iterator[str]:
    """Yield the path of each key in a section. Sections in lists are left out, since they need a position."""
    for key, name in section.attributes().items():
        path = f"{above}.{key}"
        yield path
        # One path for all optimizers, and not one for each: `trainer.init.optimizer.NAME.weight_decay`.
        path = f"{above}.NAME" if issubclass(section, Choice) else path
        for inside in _sections(section.model_fields[name].annotation):
            yield from _paths(inside, path)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that a value with this annotation can be."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) is not tuple:  # the type of a list
        for inside in get_args(annotation):
            yield from _sections(inside)
