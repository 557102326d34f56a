"""How much of the machine a run gets."""

from __future__ import annotations

import logging
from typing import Any

from headwater.api.backend import current_backend, start_ranks
from headwater.config.base import nearest
from headwater.core.errors import ConfigError
from headwater.distributed import check_num_csx

logger = logging.getLogger(__name__)

_NUM_CSX = "CSConfig(num_csx=…)"

_CLUSTER_ONLY = (
    "credentials_path", "debug_args", "disable_version_check", "fabric_type_blacklist", "job_labels",
    "job_priority", "job_time_sec", "max_act_per_csx", "max_wgt_servers", "mgmt_address", "mgmt_namespace",
    "mount_dirs", "num_act_servers", "num_workers_per_csx", "precision_opt_level", "python_paths",
    "transfer_processes", "workflow_id",
)  # fmt: skip
"""Options that tell a wafer-scale cluster how to divide its servers: the plan decides such things here."""


class CSConfig:
    """How many compute ranks take part.

    With more than one the script is started anew as each of them: see [Note: ranks of a script]. The number
    can be said here or to the backend, before the first forward.

    Args:
        num_csx: the ranks.
        cluster: options of a wafer-scale cluster, such as `max_wgt_servers`: accepted, without
            effect.

    Attributes:
        num_csx: as given.

    Raises:
        ConfigError: if there are fewer ranks here, or an option is unknown.
    """

    _has_told = False

    def __init__(self, num_csx: int = 1, **cluster: Any) -> None:
        check_num_csx(num_csx, where=_NUM_CSX)
        for name in cluster:
            if name not in _CLUSTER_ONLY:
                close = nearest(name, ("num_csx", *_CLUSTER_ONLY))
                raise ConfigError(
                    f"unknown option {name!r}",
                    where="CSConfig",
                    remedy=f"write {close!r}" if close else f"valid are num_csx, {', '.join(_CLUSTER_ONLY)}",
                )
        self.num_csx = num_csx
        backend = current_backend()
        if num_csx > 1:
            start_ranks(num_csx, "CSX" if backend is None else backend.kind, where=_NUM_CSX)
        if cluster and not CSConfig._has_told:
            CSConfig._has_told = True
            logger.warning("CSConfig: no effect here, the plan decides: %s", ", ".join(cluster))
