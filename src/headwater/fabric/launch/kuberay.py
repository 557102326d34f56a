"""Builds a manifest for KubeRay: a Ray cluster of pods that runs one command and is deleted after it."""

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
"""Path of the params file in every pod."""
_LONGEST_NAME = 47
_HEAD = {"cpu": "2", "memory": "8192Mi"}
_GPU = "nvidia.com/gpu"
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@dataclasses.dataclass(frozen=True)
class Pods:
    """The pods of the compute ranks.

    Attributes:
        count: number of pods, without the head pod, in which the command runs.
        cpus: CPUs of each pod.
        gpus: GPUs of each pod.
        memory_bytes: memory of each pod.
        image: container image of all pods.
        volumes: path in every pod at which a persistent volume claim is mounted, by name of the claim.
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
    """Return a config map with the params, and a `RayJob` (ray.io/v1) that runs a command on new pods.

    Args:
        name: of the job.
        pods: the pods of the compute ranks.
        command: the training command; it finds the params at `PARAMS`.
        params: text of the params file.
        num_retries: how many times a failed job is started again, on new pods.

    Returns:
        The two Kubernetes objects.

    Raises:
        ConfigError: if the name is not valid in Kubernetes.
    """
    if len(name) > _LONGEST_NAME or re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is None:
        raise ConfigError(
            f"{name!r} is not a valid name of a KubeRay job",
            where="--name",
            remedy=f"write at most {_LONGEST_NAME} lowercase letters, digits and hyphens, a letter first",
        )
    map_name = f"{name}-params"
    limits = {"cpu": str(pods.cpus), "memory": f"{pods.memory_bytes // MIB}Mi"}
    start = {"num-cpus": str(pods.cpus)}
    if pods.gpus:
        # Kubernetes and Ray must agree on the number of GPUs of a pod.
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
                    # The head has 0 CPUs for Ray, so that no rank is placed beside the command.
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
    """Return the template of a pod with one container that mounts the params and all volumes."""
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
