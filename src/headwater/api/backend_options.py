"""Options of `headwater.backend`: keys of the section `backend` of a params file, and short forms of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headwater.api.ranks import refuse_restarts
from headwater.config.base import nearest
from headwater.config.problems import explain
from headwater.config.sections import BackendConfig
from headwater.core.errors import ConfigError


def config_of(backend_type: str, options: Mapping[str, Any]) -> BackendConfig:
    """Return the section of a params file that has the same meaning as the options of a script.

    Args:
        backend_type: see `headwater.backend`.
        options: see `headwater.backend`.

    Raises:
        ConfigError: if an option is unknown, wrong, or not for a user's loop.
    """
    keys = _in_full(options)
    unknown = sorted(keys.keys() - BackendConfig.attributes().keys())
    if unknown:
        close = nearest(unknown[0], BackendConfig.attributes())
        raise ConfigError(
            f"backend has no option {unknown[0]!r}",
            where="backend",
            remedy=f"did you mean {close}?" if close else "remove it; docs/all_keys.md lists all options",
        )
    try:
        config = BackendConfig.model_validate({"backend_type": backend_type, **keys})
    except ValidationError as error:
        # `from None`: pydantic's own error says the same again, in terms of its internals.
        raise _wrong_option(error) from None
    _refuse_keys_of_runs(config)
    return config


def _in_full(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with their short forms written as in a params file.

    Raises:
        ConfigError: if `num_csx` and `cluster_config` are both given.
    """
    keys = dict(options)
    if "num_csx" in keys:
        if "cluster_config" in keys:
            raise ConfigError(
                "expected num_csx or cluster_config, got both",
                where="backend, option cluster_config",
                remedy="write num_csx into cluster_config: cluster_config={'num_csx': 2, ...}",
            )
        keys["cluster_config"] = {"num_csx": keys.pop("num_csx")}
    cluster: Any = keys.get("cluster_config")
    if hasattr(cluster, "num_csx"):  # an object of headwater.utils.CSConfig
        keys["cluster_config"] = {"num_csx": cluster.num_csx}
    disk = keys.get("disk")
    if isinstance(disk, str | os.PathLike):
        keys["disk"] = {"path": os.fspath(disk)}
    return keys


def _refuse_keys_of_runs(config: BackendConfig) -> None:
    """Raise if a key is set that only a run of a params file can obey."""
    if config.placement.num_memx:
        raise ConfigError(
            f"your own loop cannot have store ranks, got num_memx={config.placement.num_memx}",
            where="backend, option cluster_config.num_memx",
            remedy="leave num_memx out; only `headwater fit` starts store ranks",
        )
    if config.micro_batch_size is not None:
        raise ConfigError(
            "in your own loop each call of the model computes one micro-batch, got "
            f"micro_batch_size={config.micro_batch_size}",
            where="backend, option micro_batch_size",
            remedy="leave micro_batch_size out; to use less memory, call the model and backward() with parts "
            "of the batch",
        )
    config.refuse_loss("backend, option loss")
    config.refuse_padding("backend, option skip_padding")
    config.refuse_updates("backend, option updates")
    refuse_restarts(config.cluster_config, where="backend, option cluster_config.max_restarts")


def _wrong_option(error: ValidationError) -> ConfigError:
    """Return an error that describes the first problem of the options."""
    first, *others = error.errors()
    if not first["loc"]:
        what, remedy = explain("backend", [first])
        return ConfigError(what, where="backend", remedy=remedy)
    # An option of several possible types has a problem for each type.
    option = first["loc"][0]
    place = ".".join(str(part) for part in first["loc"])
    same = [first, *(each for each in others if each["loc"] and each["loc"][0] == option)]
    what, remedy = explain(place if len(same) == 1 else str(option), same)
    return ConfigError(what, where=f"backend, option {place}", remedy=remedy)
