"""Descriptions of params files: one line for a file, or one line for each of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.config.base import Section
from headwater.config.origins import KeyPath, dotted
from headwater.config.run import RunConfig, read_run
from headwater.core.units import format_count


def describe_params(name: str, run: RunConfig, parameters: int | None = None) -> str:
    """Return a line about a params file: its name, the model's family and size, and the data.

    Args:
        name: name of the file.
        run: the run that it describes.
        parameters: number of the model's parameters, if they were counted.
    """
    model = run.init.model
    data = "–" if run.fit is None else run.fit.train_dataloader.data_processor
    sizes = [
        f"{label} {value}"
        for key, label in _SIZES.items()
        if isinstance(value := getattr(model, key, None), int) and not isinstance(value, bool)
    ]
    count = "" if parameters is None else f"{format_count(parameters):>7}  "
    return f"{name:38}  {model.name:18}  {', '.join(sizes) or '–':34}  {count}{data}"


_SIZES = {
    "num_hidden_layers": "layers",
    "encoder_num_hidden_layers": "layers",
    "depth": "layers",
    "hidden_size": "width",
    "d_model": "width",
}


def show_params(path: Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> list[str]:
    """Return a line for each value of a run, with the place where it was written.

    Args:
        path: the params file.
        overrides: values that replace those of the file; see `load_params`.

    Raises:
        ConfigError: if the file is not valid.
    """
    _, document, trainer = read_run(path, overrides)
    lines = []
    for location, value in _values(trainer, ("trainer",)):
        place = document.locate(("trainer",), location[1:])
        # For a key that is not in the document, `locate` returns the path of its section.
        given = str(place[-1]).lower() == str(location[-1]).lower() and document.get(place) is not None
        origin = document.origin(place)
        where = f"{origin.source}:{origin.line}" if origin.line else origin.source
        lines.append(f"{dotted(location)}: {value}  # {where if given else 'default'}")
    return lines


def _values(value: Any, location: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield the location and the YAML text of each scalar and plain list below `value`."""
    if isinstance(value, Section):
        for key, name in value.attributes().items():
            if (inside := getattr(value, name)) is not None:
                yield from _values(inside, (*location, key))
    elif isinstance(value, tuple) and any(isinstance(entry, Section) for entry in value):
        for index, entry in enumerate(value):
            yield from _values(entry, (*location, index))
    elif isinstance(value, tuple):
        yield location, f"[{', '.join(map(_yaml_text, value))}]"
    else:
        yield location, _yaml_text(value)


def _yaml_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
