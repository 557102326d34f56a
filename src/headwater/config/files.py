"""Finding and reading of params files: the user's, the shipped ones, and those named by `extends`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from headwater.config.base import expand_user, nearest
from headwater.config.document import Document, merge
from headwater.config.forms import OLDER_SECTIONS, canonical
from headwater.config.overrides import apply_overrides
from headwater.config.releases.folders import name_model
from headwater.config.yaml_reader import read_document
from headwater.core.errors import ConfigError, shorten
from headwater.core.files import is_file
from headwater.core.names import nearest_sibling

_SHIPPED = Path(__file__).resolve().parents[1] / "params"
_FEW_NAMES = 12
"""Up to this number, names are listed one by one in an error."""


@functools.cache
def shipped_params() -> Mapping[str, Path]:
    """Return the params files that ship with the package, by name (`gpt/tiny`).

    Files whose names begin with `_` are not included: they are the common parts that other files extend.
    """
    files = sorted(file for file in _SHIPPED.rglob("*.yaml") if not file.name.startswith("_"))
    return {file.relative_to(_SHIPPED).with_suffix("").as_posix(): file for file in files}


def find_params(name_or_path: str | Path) -> Path:
    """Return the path of a params file.

    Args:
        name_or_path: path of a file, or the name of a shipped one.

    Raises:
        ConfigError: if neither exists.
    """
    return find_file(name_or_path, shipped_params(), "params file")


def find_file(
    name_or_path: str | Path, shipped: Mapping[str, Path], kind: str, *, where: str | None = None
) -> Path:
    """Return the path of a file of the user, or of a shipped one.

    Args:
        name_or_path: path of a file, or the name of a shipped one.
        shipped: the shipped files, by name.
        kind: kind of the file, for the error.
        where: place where the user wrote it, for the error.

    Raises:
        ConfigError: if neither exists.
    """
    path = expand_user(Path(name_or_path))
    if is_file(path):
        return path
    name = path.as_posix().removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    close = _similar_file(path) or nearest(name, shipped)
    listed = f"a path, or one of: {', '.join(_in_short(shipped))}"
    raise ConfigError(
        f"there is no {kind} {shorten(str(name_or_path), 200)!r}",
        where=where,
        remedy=f"write {close!r}, or {listed}" if close else f"write {listed}",
    )


def _similar_file(path: Path) -> str | None:
    """Return the file beside `path` with the most similar name, if `path` is the name of a params file."""
    if path.suffix not in (".yaml", ".yml"):
        return None
    try:
        sibling = nearest_sibling(path)
    except OSError:  # the folder cannot be read, or its name is too long
        return None
    # The suffix alone makes two names similar.
    return None if sibling is None or nearest(path.stem, [sibling.stem]) is None else str(sibling)


def _in_short(names: Collection[str]) -> list[str]:
    """Return the names. If there are many, return only their folders."""
    if len(names) <= _FEW_NAMES:
        return list(names)
    return [f"{folder}/…" for folder in dict.fromkeys(name.partition("/")[0] for name in names)]


def read_params(path: Path, overrides: Mapping[str, Any], above: tuple[Path, ...] = ()) -> Document:
    """Read a params file and the files that it extends, and return their params in the newer form.

    Args:
        path: the file.
        overrides: values that replace those of the file, by flag. Those with keys of the older form apply to
            this file only, not to the files that it extends.
        above: files that extend this one.

    Raises:
        ConfigError: if a file is missing or not valid, or `extends` is circular.
    """
    document = read_document(path)
    if not document.tree and not overrides:
        raise ConfigError(
            "the params file is empty",
            where=str(path),
            remedy="start with the key `trainer:`, or with `extends: gpt/tiny`; or use headwater config init",
        )
    base = document.tree.get("extends")
    older = [flag for flag in overrides if "." in flag and flag.split(".")[0] in OLDER_SECTIONS]
    if older and "trainer" in document.tree:
        raise ConfigError(
            f"expected keys that begin with trainer., got {older[0]} of the older form",
            where=str(path),
            remedy="this file is in the newer form: write the key of the newer form on the command line",
        )
    own = Document({key: value for key, value in document.tree.items() if key != "extends"}, document.origins)
    own = apply_overrides(own, overrides, OLDER_SECTIONS)
    if base is not None:
        below = _read_base(document, path, base, above, lambda file, above: read_params(file, {}, above))
        # The base is in the newer form already, also if its file is in the older one.
        own = merge(below, canonical(own))
        return own if above else apply_overrides(name_model(own, path), overrides, ("trainer",))
    if above:
        return canonical(own)
    # The meaning of some keys of the older form depends on the model, so determine its name first.
    own = canonical(name_model(own, path, overrides.get("model")))
    return apply_overrides(own, overrides, ("trainer",))


def read_as_written(path: Path, above: tuple[Path, ...] = ()) -> Document:
    """Read a params file and the files that it extends, without converting their form.

    Args:
        path: the file.
        above: files that extend this one.

    Raises:
        ConfigError: if a file is missing or cannot be parsed, or `extends` is circular.
    """
    document = read_document(path)
    base = document.tree.get("extends")
    own = Document({key: value for key, value in document.tree.items() if key != "extends"}, document.origins)
    return own if base is None else merge(_read_base(document, path, base, above, read_as_written), own)


def _read_base(
    document: Document,
    path: Path,
    base: Any,
    above: tuple[Path, ...],
    read: Callable[[Path, tuple[Path, ...]], Document],
) -> Document:
    where = str(document.origin(("extends",)))
    if not isinstance(base, str):
        raise ConfigError(
            f"expected extends to be the name of one file, got {shorten(repr(base), 80)}",
            where=where,
            remedy="write for example extends: gpt/tiny",
        )
    sibling = path.parent / base
    try:
        found = find_params(sibling if is_file(sibling) else base)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, remedy=error.remedy) from error
    chain = (*above, path)
    if any(found.samefile(file) for file in chain):
        names = " → ".join(str(file) for file in (*chain, found))
        raise ConfigError(f"circular extends: {names}", where=where, remedy="remove one of these extends")
    return read(found, chain)
