"""Input workers of a run: which data they read, and which of them a rank uses."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.config.data import DataConfig
from headwater.config.models import ModelConfig
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.data.remote_samples import Address, InputWorkers, RemoteSamples
from headwater.fabric.fabric import Fabric
from headwater.fabric.secret import file_secret
from headwater.trainer.datasets import open_samples, seeded

if TYPE_CHECKING:
    from headwater.data.source import Samples

_OF_RANK = {"input_workers", "num_workers", "prefetch_factor", "persistent_workers"}
"""Keys of a data section that do not change its batches."""


STARTED = "HEADWATER_INPUT_WORKERS"
"""Environment variable with the addresses of the workers that `headwater fit` has started, with commas."""
SSH = "ssh://"
"""Beginning of an entry of `input_workers` that names a host on which `headwater fit` starts workers."""


def purpose_of(config: DataConfig, model: ModelConfig) -> str:
    """Return a text that identifies a data set. A rank and a worker with the same params get equal texts.

    Args:
        config: the data section, with its seed.
        model: the model that reads the data.
    """
    parts = [config.model_dump(exclude=_OF_RANK), model.model_dump()]
    text = json.dumps(parts, sort_keys=True, default=_text)
    return f"input {hashlib.sha256(text.encode()).hexdigest()}"


def _text(value: object) -> str:
    # A worker may have another working folder than the run.
    return str(value.absolute() if isinstance(value, Path) else value)


def data_of_run(config: RunConfig) -> dict[str, Samples]:
    """Return the data sets of a run that name `input_workers`, by purpose.

    Raises:
        ConfigError: if no data section names input workers.
        DataError: if the data are missing, malformed or do not fit the model.
    """
    sections = [config.fit.train_dataloader, *config.fit.val_dataloader] if config.fit else []
    model, found = config.init.model, {}
    for section in sections:
        if section.input_workers:
            seed = seeded(section, config.init.seed)
            found[purpose_of(seed, model)] = open_samples(seed, model)
    if not found:
        raise ConfigError(
            "the params name no input_workers",
            where=str(config.source),
            remedy="add input_workers: [host:port] to trainer.fit.train_dataloader",
        )
    return found


def remote_samples(
    config: DataConfig, model: ModelConfig, fabric: Fabric, per_csx: int | None
) -> RemoteSamples:
    """Return the data set of the input workers that a section names.

    Args:
        config: the data section, with its seed.
        model: the model that reads the data.
        fabric: the ranks.
        per_csx: workers that each rank uses at the same time; `None`: they are divided among the ranks.

    Raises:
        ConfigError: if an address is malformed.
        DataError: if no worker answers, or the workers have other data.
        RankError: if the secret of the ranks cannot be read.
    """
    addresses = [read_place(text, "input_workers") for text in _addresses(config.input_workers, os.environ)]
    ordered, count = workers_of_rank(addresses, fabric.rank % fabric.num_csx, fabric.num_csx, per_csx)
    secret = file_secret(os.environ)
    return RemoteSamples(InputWorkers(ordered, purpose_of(config, model), secret), count)


def _addresses(named: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the addresses of the workers that a section names. Those on SSH hosts already run."""
    own = [text for text in named if not text.startswith(SSH)]
    if len(own) == len(named):
        return own
    if not environment.get(STARTED):
        raise ConfigError(
            "input_workers: ssh://host works only if headwater fit starts the ranks itself",
            where="input_workers",
            remedy="start each worker with headwater input_worker, and write its host:port",
        )
    return [*own, *environment[STARTED].split(",")]


def workers_of_rank(
    addresses: Sequence[Address], rank: int, num_csx: int, per_csx: int | None
) -> tuple[list[Address], int]:
    """Return all workers in the order in which a rank tries them, and how many of them it uses at once.

    Args:
        addresses: the workers.
        rank: number of the compute rank.
        num_csx: number of compute ranks.
        per_csx: workers to use at once; `None`: all workers divided by the ranks, at least 1.
    """
    count = min(per_csx or max(len(addresses) // num_csx, 1), len(addresses))
    # Each rank begins at other workers. If some of these do not answer, it takes the next ones.
    first = rank * count % len(addresses)
    return [*addresses[first:], *addresses[:first]], count


def read_place(text: str, where: str) -> Address:
    """Return host and port of `host:port`.

    Args:
        text: the address.
        where: place where the user wrote it, for the error.

    Raises:
        ConfigError: if the text does not have this form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"expected an address host:port, got {text!r}",
            where=where,
            remedy="write for example node7:5500; a port is at most 65535",
        )
    return host.strip("[]"), int(port)
