"""Small clusters with round numbers, and plans of GPTs for them."""

import dataclasses

from synthetic import gpt

from headwater.core.precision import Precision
from headwater.plan.cluster.scaling import simulate_point
from headwater.plan.cluster.types import (
    Accelerator,
    Cluster,
    Disk,
    Host,
    Memory,
    Network,
    StoreHosts,
    place,
)
from headwater.plan.options import PlanRequest
from headwater.plan.types import Resources

GB = 10**9
CPU_RATES = {"fp32": 3e11, "bf16": 1e12, "fp16": 3e11}
GPU_RATES = {"fp32": 5e13, "bf16": 5e14, "fp16": 5e14}
MEMORY = Memory(64 * GB, bytes_per_s=2e10, adamw_params_per_s=1e9)
DISK = Disk(500 * GB, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
CORES = Host(2, MEMORY, CPU_RATES, dict.fromkeys(CPU_RATES, 1e9), disk=DISK)
GPUS = Host(
    4,
    dataclasses.replace(MEMORY, size_bytes=1000 * GB, bytes_per_s=4e11, adamw_params_per_s=1e10),
    GPU_RATES,
    dict.fromkeys(GPU_RATES, 8e11),
    accelerator=Accelerator(20 * GB, link_bytes_per_s=5e10),
)
WAFER = Host(
    1,
    dataclasses.replace(MEMORY, size_bytes=100 * GB),
    {"fp32": 1.9e15, "bf16": 7.5e15, "fp16": 7.5e15},
    dict.fromkeys(GPU_RATES, 5e15),
    accelerator=Accelerator(40 * GB, link_bytes_per_s=None),
)
ETHERNET = Network(bytes_per_s=1.25e8, latency_s=1e-4)
STORE = StoreHosts(4, dataclasses.replace(GPUS.memory, size_bytes=2000 * GB))

BOXES = Cluster("boxes", 512, CORES, ETHERNET)
SERVERS = Cluster("servers", 256, GPUS, Network(5e10, 5e-6))
SERVERS_AND_STORE = dataclasses.replace(SERVERS, store=STORE)
WAFERS = Cluster("wafers", 192, WAFER, Network(1.5e11, 5e-6, fan_out=4), STORE)
CLUSTERS = (BOXES, SERVERS, SERVERS_AND_STORE, WAFERS)

SMALL = {"layers": 6, "hidden": 768, "vocabulary": 50257, "length": 512}


def request(batch_size, shape=None, **changes):
    """Return the request for a plan of training a GPT in bf16 with Adam."""
    given = {"precision": Precision("bf16"), "optimizer_state_bytes": 8, "resources": Resources()} | changes
    return PlanRequest(gpt(**(shape or SMALL)), batch_size=batch_size, **given)


def point(cluster, num_csx, batch_size, shape=None, **changes):
    """Return the simulation of one step."""
    return simulate_point(request(batch_size // num_csx, shape, **changes), place(cluster, num_csx))


def with_network(cluster, **changes):
    return dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, **changes))


def with_host(cluster, **changes):
    return dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, **changes))
