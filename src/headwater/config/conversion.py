"""Params of older forms and releases, written out in the newest form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headwater.config.base import NoEffect, Section
from headwater.config.document import remove
from headwater.config.origins import KeyPath
from headwater.config.run import read_run


@dataclasses.dataclass(frozen=True)
class Converted:
    """A params file in the newest form.

    Attributes:
        text: what to write.
        notices: keys that are left out because they had no effect, and what was assumed; a line each.
    """

    text: str
    notices: tuple[str, ...]


def convert_params(path: Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Converted:
    """Return the params file at `path`, of any form and release, in the newest form.

    Keys that the file leaves out stay absent, and those without effect are left out. What the file extends
    is written out.

    Raises:
        ConfigError: if anything is wrong with the file.
    """
    run, document, trainer = read_run(path, overrides)
    for location in list(_without_effect(trainer, ())):
        place = document.locate(("trainer",), location)
        parent = document.get(place[:-1])
        if isinstance(parent, dict) and place[-1] == location[-1]:
            document = remove(document, place)
    text = yaml.safe_dump(document.tree, sort_keys=False, allow_unicode=True)
    return Converted(text, run.notices)


def _without_effect(section: Section, location: KeyPath) -> Iterator[KeyPath]:
    """Yield where each key is that was given and changes nothing."""
    for key, name in section.attributes().items():
        metadata = section.__class__.model_fields[name].metadata
        value = getattr(section, name)
        if name in section.model_fields_set and any(isinstance(mark, NoEffect) for mark in metadata):
            yield (*location, key)
        elif isinstance(value, Section):
            yield from _without_effect(value, (*location, key))
        elif isinstance(value, tuple):
            for index, entry in enumerate(value):
                if isinstance(entry, Section):
                    yield from _without_effect(entry, (*location, key, index))
