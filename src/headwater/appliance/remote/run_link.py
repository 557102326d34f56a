"""The file in a model_dir of this machine that names the appliance and the run from which artifacts come."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

from headwater.appliance.remote.address import Address
from headwater.core.errors import ConfigError
from headwater.core.files import make_folder, replace_file, why_unreadable

FILE = "appliance.json"
_OTHER = re.compile(r"[^A-Za-z0-9_-]+")


def run_name(model_dir: Path, address: Address) -> str:
    """Return the name of the run on the appliance that belongs to a model_dir; choose one if it is new.

    The name is kept in the folder. So a later job of the same model_dir continues from its checkpoints there.

    Args:
        model_dir: folder on this machine.
        address: the appliance.

    Raises:
        ConfigError: if the folder belongs to another appliance, or to a run of this machine.
        StoreError: if the file cannot be written.
    """
    path = model_dir / FILE
    if path.is_file():
        return _kept_name(path, address)
    if any(model_dir.glob("checkpoint_*")):
        raise ConfigError(
            "the model_dir has checkpoints of a run on this machine, which an appliance cannot continue",
            where=str(model_dir),
            remedy="name another model_dir; to continue from a checkpoint, name it with --checkpoint_path",
        )
    stem = _OTHER.sub("-", model_dir.absolute().name).strip("-")[:80]
    name = f"{stem or 'run'}-{uuid.uuid4().hex[:12]}"
    make_folder(model_dir)
    replace_file(path, json.dumps({"appliance": str(address), "run": name}, indent=2).encode())
    return name


def linked_run(model_dir: Path, address: Address) -> str | None:
    """Return the name of the run on the appliance that belongs to a model_dir, or `None`.

    Raises:
        ConfigError: if the folder belongs to another appliance.
    """
    path = model_dir / FILE
    return _kept_name(path, address) if path.is_file() else None


def _kept_name(path: Path, address: Address) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        appliance, name = str(found["appliance"]), str(found["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the file cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="name another model_dir",
        ) from error
    if appliance != str(address):
        raise ConfigError(
            f"the model_dir belongs to a run on {appliance}, not on {address}",
            where=str(path),
            remedy=f"write --appliance {appliance}, or name another model_dir",
        )
    return name
