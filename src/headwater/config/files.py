"""Finds params files: the user's own, those that ship, and those that one extends."""

from __future__ import annotations

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

_SHIPPED = Path(__file__).resolve().parents[1] / "params"
_FEW_NAMES = 12
"""So many names are listed one by one."""


def shipped_params() -> dict[str, Path]:
    """The params files that ship with the package, by name (`gpt/tiny`).

    Those whose names begin with `_` are no runs, but what several of them extend.
    """
    files = sorted(file for file in _SHIPPED.rglob("*.yaml") if not file.name.startswith("_"))
    return {file.relative_to(_SHIPPED).with_suffix("").as_posix(): file for file in files}


def find_params(name_or_path: str | Path) -> Path:
    """The params file that `name_or_path` means: a file, or the name of one that ships.

    Raises:
        ConfigError: if there is neither.
    """
    return find_file(name_or_path, shipped_params(), "params file")


def find_file(
    name_or_path: str | Path, shipped: Mapping[str, Path], kind: str, *, where: str | None = None
) -> Path:
    """The file that `name_or_path` means: a path, or the name of one that ships.

    Args:
        name_or_path: as somebody has written it.
        shipped: what ships, by name.
        kind: of the file; for the error.
        where: it was written; for the error.

    Raises:
        ConfigError: if there is neither.
    """
    path = expand_user(Path(name_or_path))
    if _is_file(path):
        return path
    name = path.as_posix().removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    close = nearest(name, shipped)
    listed = f"a path, or one of: {', '.join(_in_short(shipped))}"
    raise ConfigError(
        f"there is no {kind} {shorten(str(name_or_path), 200)!r}",
        where=where,
        remedy=f"write {close!r}, or {listed}" if close else f"write {listed}",
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def _in_short(names: Collection[str]) -> list[str]:
    """Names to choose from; of many those in a folder together."""
    if len(names) <= _FEW_NAMES:
        return list(names)
    return [f"{folder}/…" for folder in dict.fromkeys(name.partition("/")[0] for name in names)]


def read_params(path: Path, overrides: Mapping[str, Any], above: tuple[Path, ...] = ()) -> Document:
    """The params in `path` in the newer form, over those of the file it extends, with `overrides`.

    Args:
        path: the file.
        overrides: values by flag; those in the older form count in this file alone.
        above: files that extend this one.

    Raises:
        ConfigError: if a file is missing or wrong in form, or extends itself.
    """
    document = read_document(path)
    base = document.tree.get("extends")
    older = [flag for flag in overrides if "." in flag and flag.split(".")[0] in OLDER_SECTIONS]
    if older and "trainer" in document.tree:
        raise ConfigError(
            "the command line names keys of the older form, the file is in the newer one",
            where=str(path),
            remedy="write keys that begin with trainer.",
        )
    own = Document({key: value for key, value in document.tree.items() if key != "extends"}, document.origins)
    own = apply_overrides(own, overrides, OLDER_SECTIONS)
    if base is not None:
        below = _read_base(document, path, base, above, lambda file, above: read_params(file, {}, above))
        own = merge(below, canonical(own))
        return own if above else apply_overrides(name_model(own, path), overrides, ("trainer",))
    if above:
        return canonical(own)
    # Keys of the older form may mean something else from model to model, so the name comes first.
    own = canonical(name_model(own, path, overrides.get("model")))
    return apply_overrides(own, overrides, ("trainer",))


def read_as_written(path: Path, above: tuple[Path, ...] = ()) -> Document:
    """The params in `path` over those of the file it extends, in whatever form they are.

    Args:
        path: the file.
        above: files that extend this one.

    Raises:
        ConfigError: if a file is missing or cannot be parsed, or extends itself.
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
        raise ConfigError("extends names one file", where=where, remedy="write for example extends: gpt/tiny")
    beside = path.parent / base
    try:
        found = find_params(beside if _is_file(beside) else base)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, remedy=error.remedy) from error
    chain = (*above, path)
    if any(found.samefile(file) for file in chain):
        names = " → ".join(str(file) for file in (*chain, found))
        raise ConfigError(
            f"params files extend each other in a circle: {names}", where=where, remedy="break it"
        )
    return read(found, chain)
