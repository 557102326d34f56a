"""A manifest for KubeRay: a Ray cluster of pods in which a command runs, and which ends with it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from headwater.core.errors import ConfigError
from headwater.core.units import MIB

PARAMS = PurePosixPath("/etc/headwater/params.yaml")
"""Where every pod has the params."""
_LONGEST_NAME = 47
_HEAD = {"cpu": "2", "memory": "8192Mi"}
_GPU = "nvidia.com/gpu"
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@dataclasses.dataclass(frozen=True)
class Pods:
    """What computes.

    Attributes:
        count: how many, beside the one in which the command runs.
        cpus: of each.
        gpus: of each.
        memory_bytes: of each.
        image: of all.
        volumes: names of persistent volume claims, and where every pod has them.
    """

    count: int
    cpus: int
    gpus: int
    memory_bytes: int
    image: str
    volumes: Mapping[str, PurePosixPath]


def manifest(
    name: str, pods: Pods, command: Sequence[str], params: str, *, num_retries: int
) -> list[dict[str, Any]]:
    """A config map with the params, and a `RayJob` (ray.io/v1) that runs a command on pods of its own.

    Args:
        name: of the job.
        pods: that compute.
        command: that trains; it finds the params at `PARAMS`.
        params: text of the file.
        num_retries: how often the job is started again, on new pods, when it has failed.

    Raises:
        ConfigError: if Kubernetes does not allow the name.
    """
    if len(name) > _LONGEST_NAME or re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is None:
        raise ConfigError(
            f"{name!r} is no name for a job of KubeRay",
            where="--name",
            remedy=f"write at most {_LONGEST_NAME} small letters, digits and hyphens, a letter first",
        )
    map_name = f"{name}-params"
    limits = {"cpu": str(pods.cpus), "memory": f"{pods.memory_bytes // MIB}Mi"}
    start = {"num-cpus": str(pods.cpus)}
    if pods.gpus:
        limits[_GPU] = start["num-gpus"] = str(pods.gpus)
    head = _template("ray-head", pods, _HEAD, map_name)
    head["spec"]["containers"][0]["ports"] = [
        {"name": port, "containerPort": number} for port, number in _PORTS.items()
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": map_name},
            "data": {PARAMS.name: params},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": name},
            "spec": {
                "entrypoint": shlex.join(command),
                "backoffLimit": num_retries,
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    # No rank is placed beside the command: the head has no CPUs to give.
                    "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
                    "workerGroupSpecs": [
                        {
                            "groupName": "ranks",
                            "replicas": pods.count,
                            "minReplicas": pods.count,
                            "maxReplicas": pods.count,
                            "rayStartParams": start,
                            "template": _template("ray-worker", pods, limits, map_name),
                        }
                    ],
                },
            },
        },
    ]


def _template(container: str, pods: Pods, limits: Mapping[str, str], map_name: str) -> dict[str, Any]:
    """A pod with one container, which has the params and all volumes."""
    volumes: list[dict[str, Any]] = [{"name": "params", "configMap": {"name": map_name}}]
    mounts: list[dict[str, Any]] = [{"name": "params", "mountPath": str(PARAMS.parent), "readOnly": True}]
    for index, (claim, path) in enumerate(pods.volumes.items()):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{index}", "mountPath": str(path)})
    return {
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": container,
                    "image": pods.image,
                    "resources": {"requests": dict(limits), "limits": dict(limits)},
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        }
    }
