"""The cluster configuration of a run: its number of compute ranks."""

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
"""Options of Cerebras' `CSConfig` for the servers of its cluster. Here the plan makes these decisions."""


class CSConfig:
    """Sets the number of compute ranks of a run, under the name of Cerebras' class.

    If it is more than 1, the script is started once for each rank: see [Note: ranks of a script]. Give the
    number here or to `headwater.backend`, before the first forward.

    Args:
        num_csx: number of compute ranks.
        cluster: options of a Cerebras cluster, such as `max_wgt_servers`; ignored, with a warning.

    Attributes:
        num_csx: as given.

    Raises:
        ConfigError: if this machine has fewer cores than ranks, or an option is unknown.
    """

    _has_warned = False

    def __init__(self, num_csx: int = 1, **cluster: Any) -> None:
        check_num_csx(num_csx, where=_NUM_CSX)
        for name in cluster:
            if name not in _CLUSTER_ONLY:
                close = nearest(name, ("num_csx", *_CLUSTER_ONLY))
                raise ConfigError(
                    f"unknown option {name!r}",
                    where="CSConfig",
                    remedy=f"write {close!r}" if close else f"valid: num_csx, {', '.join(_CLUSTER_ONLY)}",
                )
        self.num_csx = num_csx
        backend = current_backend()
        if num_csx > 1:
            start_ranks(num_csx, "CSX" if backend is None else backend.kind, where=_NUM_CSX)
        if cluster and not CSConfig._has_warned:
            CSConfig._has_warned = True
            logger.warning("CSConfig: ignored options (the plan decides): %s", ", ".join(cluster))
