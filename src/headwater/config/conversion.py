"""Conversion of params files of older forms and releases to the newest form."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headwater.config.base import Section
from headwater.config.document import remove
from headwater.config.origins import KeyPath
from headwater.config.run import read_run


@dataclasses.dataclass(frozen=True)
class Converted:
    """A params file converted to the newest form.

    Attributes:
        text: text of the new file.
        notices: a line for each key that was dropped because it had no effect, and for each assumption.
    """

    text: str
    notices: tuple[str, ...]


def convert_params(path: Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Converted:
    """Convert a params file of any form and release to the newest form.

    Keys that are absent stay absent, and keys without effect are dropped. The content of files named by
    `extends` is included.

    Args:
        path: the params file.
        overrides: values that replace those of the file; see `load_params`.

    Raises:
        ConfigError: if the file is not valid.
    """
    run, document, trainer = read_run(path, overrides)
    for location in _without_effect(trainer):
        # Defaults of a family count as given, but are not in the document: `locate` returns their section.
        place = document.locate(("trainer",), location)
        parent = document.get(place[:-1])
        if isinstance(parent, dict) and place[-1] == location[-1]:
            document = remove(document, place)
    text = yaml.safe_dump(document.tree, sort_keys=False, allow_unicode=True)
    return Converted(text, run.notices)


def _without_effect(section: Section) -> Iterator[KeyPath]:
    """Yield the location of each given key that never has an effect."""
    for location, inside in section.sections():
        for key, _ in inside.ignored():
            yield (*location, key)
