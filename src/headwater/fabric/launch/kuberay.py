"""A manifest for KubeRay: a Ray cluster of pods that runs one command and is deleted after it."""

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
_GPU = "nvidia.com/gpu"


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


@dataclasses.dataclass(frozen=True)
class _Node:
    """A kind of node of a Ray cluster. Each of them is a pod with one container.

    Attributes:
        container: name of the container.
        limits: resources that Kubernetes gives to the pod.
        start: parameters of `ray start`, which say what Ray may use of the pod.
        ports: ports of the container, by name.
    """

    container: str
    limits: Mapping[str, str]
    start: Mapping[str, str]
    ports: Mapping[str, int] = dataclasses.field(default_factory=dict)


_HEAD = _Node(
    "ray-head",
    limits={"cpu": "2", "memory": "8192Mi"},
    # Ray gets no CPU of the head, so that it places no rank beside the command.
    start={"num-cpus": "0"},
    ports={"gcs-server": 6379, "dashboard": 8265, "client": 10001},
)


def _worker(pods: Pods) -> _Node:
    """Return the node on which a compute rank runs."""
    limits = {"cpu": str(pods.cpus), "memory": f"{pods.memory_bytes // MIB}Mi"}
    start = {"num-cpus": str(pods.cpus)}
    if pods.gpus:
        # Kubernetes and Ray must agree on the number of GPUs of a pod.
        limits[_GPU] = start["num-gpus"] = str(pods.gpus)
    return _Node("ray-worker", limits, start)


def manifest(
    name: str, pods: Pods, command: Sequence[str], params: str, *, num_retries: int
) -> list[dict[str, Any]]:
    """Return a config map with the params, and a `RayJob` (ray.io/v1) that runs a command on new pods.

    Args:
        name: the name of the job.
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
                "rayClusterSpec": _cluster(pods, map_name),
            },
        },
    ]


def _cluster(pods: Pods, map_name: str) -> dict[str, Any]:
    """Return a Ray cluster of one head and a fixed number of workers."""
    ranks = {
        "groupName": "ranks",
        "replicas": pods.count,
        "minReplicas": pods.count,
        "maxReplicas": pods.count,
        **_group(_worker(pods), pods, map_name),
    }
    return {"headGroupSpec": _group(_HEAD, pods, map_name), "workerGroupSpecs": [ranks]}


def _group(node: _Node, pods: Pods, map_name: str) -> dict[str, Any]:
    """Return the parameters of Ray and the template of pods for a group of equal nodes."""
    return {"rayStartParams": dict(node.start), "template": _template(node, pods, map_name)}


def _template(node: _Node, pods: Pods, map_name: str) -> dict[str, Any]:
    """Return the template of a pod with one container that mounts the params and all volumes."""
    volumes: list[dict[str, Any]] = [{"name": "params", "configMap": {"name": map_name}}]
    mounts: list[dict[str, Any]] = [{"name": "params", "mountPath": str(PARAMS.parent), "readOnly": True}]
    for index, (claim, path) in enumerate(pods.volumes.items()):
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{index}", "mountPath": str(path)})
    container: dict[str, Any] = {
        "name": node.container,
        "image": pods.image,
        "resources": {"requests": dict(node.limits), "limits": dict(node.limits)},
        "volumeMounts": mounts,
    }
    if node.ports:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in node.ports.items()]
    return {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes}}
