"""The params of a run that is sent to another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headwater.appliance.remote.bundle import Bundle
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.trainer.run_dir import given_params

PARAMS_FILE = "params.yaml"
"""Name of the params file in the working folder of the job."""

_OF_APPLIANCE = {
    ("trainer", "init", "model_dir"),
    ("trainer", "init", "backend", "disk", "path"),
    ("trainer", "init", "backend", "compile_dir"),
}
"""Paths that a run writes to."""
_OF_CLIENT = ("mgmt_address", "python_paths", "mount_dirs")
"""Keys of `cluster_config` that the submission has used."""
_Place = tuple[str, ...]


def bundle_params(config: RunConfig, bundle: Bundle, unread: Sequence[str] = ()) -> bytes:
    """Add the small data that a run names to a bundle, and return its params file for the appliance.

    A path of a file or folder on this machine is replaced by its place in the bundle. Paths in one of the
    `mount_dirs`, and absolute paths that do not exist on this machine, stay: they are paths of the appliance.

    Args:
        config: the run.
        bundle: receives the files.
        unread: keys of `trainer`, such as `fit.train_dataloader`, whose paths the command does not read. They
            are not sent, and stay as they are.

    Raises:
        ConfigError: if a relative path does not exist on this machine, or the files are too large.
    """
    tree: dict[str, Any] = given_params(config)
    cluster = tree["trainer"]["init"].get("backend", {}).get("cluster_config", {})
    for name in _OF_CLIENT:
        cluster.pop(name, None)
    mounted = config.init.backend.cluster_config.mount_dirs or ()
    bundler = Bundler(bundle, [path.absolute() for path in mounted], unread)
    placed = _place(tree, (), bundler)
    return yaml.safe_dump(placed, sort_keys=False, allow_unicode=True).encode()


class Bundler:
    """Adds paths of this machine to a bundle, each once.

    Args:
        bundle: receives the files.
        mounted: folders with the same path on the appliance.
        unread: see `bundle_params`.
    """

    def __init__(self, bundle: Bundle, mounted: Sequence[Path], unread: Sequence[str] = ()) -> None:
        self._bundle = bundle
        self._mounted = mounted
        self._unread = tuple(f"trainer.{key}." for key in unread)
        self._places: dict[Path, str] = {}

    def place(self, path: Path, where: str) -> str:
        """Return the path that the job uses for a path of the user.

        Raises:
            ConfigError: if the path is relative and does not exist, or its files are too large.
        """
        if f"{where}.".startswith(self._unread):
            return str(path)
        absolute = path.absolute()
        if any(absolute.is_relative_to(folder) for folder in self._mounted):
            return str(absolute)
        if not path.exists():
            if path.is_absolute():
                return str(path)
            raise ConfigError(
                f"{path} does not exist on this machine, and is not an absolute path of the appliance",
                where=where,
                remedy="correct the path, or write the absolute path on the appliance",
            )
        if absolute not in self._places:
            self._places[absolute] = f"data/{len(self._places)}/{absolute.name}"
            self._bundle.add(absolute, self._places[absolute])
        return self._places[absolute]


def _place(value: Any, place: _Place, bundler: Bundler) -> Any:
    if isinstance(value, Mapping):
        return {key: _place(item, (*place, str(key)), bundler) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place(item, place, bundler) for item in value]
    if not isinstance(value, Path):
        return value
    if place in _OF_APPLIANCE:
        return str(value)
    return bundler.place(value, ".".join(place))
