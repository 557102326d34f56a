"""Cluster files: those that ship are right, and whatever is wrong in one is named with what to write."""

import pytest
import yaml

from headwater.config.cluster import find_cluster, load_cluster, shipped_clusters
from headwater.core.errors import ConfigError
from headwater.core.units import parse_rate

CLUSTER = {
    "description": "two boxes",
    "hosts": 2,
    "host": {
        "ranks": 2,
        "memory": {"size": "24GiB", "bytes_per_s": "20 GB/s", "adamw_params_per_s": 1e9},
        "flops_per_s": {"fp32": 3e11, "bf16": 1e12, "fp16": 3e11},
        "saved_bytes_per_s": {"fp32": 1e9, "bf16": 1e9, "fp16": "500 MB/s"},
    },
    "network": {"bytes_per_s": "1 Gbit/s", "latency_s": 1e-4},
}
STORE = {"hosts": 1, "memory": CLUSTER["host"]["memory"]}


def changed(path, value):
    """The cluster with the value at `path` replaced, or removed where it is `None`."""
    document = yaml.safe_load(yaml.safe_dump(CLUSTER))
    section = document
    for key in path[:-1]:
        section = section[key]
    section.pop(path[-1], None)
    if value is not None:
        section[path[-1]] = value
    return document


def load(folder, document):
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return load_cluster(file)


def test_shipped_cluster_files_are_valid():
    assert sorted(shipped_clusters()) == ["8xh100", "cs2", "desktop_gpu", "two_cores"]
    assert all(load_cluster(name).description for name in shipped_clusters())


def test_cs2_has_the_published_numbers():
    cs2 = load_cluster("cs2")
    assert cs2.network.bytes_per_s == pytest.approx(1.2e12 / 8)
    assert cs2.host.accelerator.memory == 40 * 10**9
    assert 4 * cs2.host.saved_bytes_per_s.bf16 == pytest.approx(20e15)


def test_sizes_and_rates_are_converted_to_bytes(tmp_path):
    file = load(tmp_path, CLUSTER)
    assert file.network.bytes_per_s == 1.25e8
    assert file.host.memory.size == 24 << 30
    assert file.host.saved_bytes_per_s.fp16 == 5e8


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100 Mbit/s", 1.25e7),
        ("1.2 Tbps", 1.5e11),
        ("50GB/s", 5e10),
        ("2 GiB/s", 2.0**31),
        (7, 7.0),
        ("8b/s", 1),
    ],
)
def test_rates_are_converted_to_bytes_per_second(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["fast", "50 GB", "-1 GB/s", "10 XB/s", float("inf"), True])
def test_text_that_is_not_a_rate_is_refused(text):
    with pytest.raises(ConfigError, match="expected a rate"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("hosts",), 0, "expected hosts to be a number >= 1, got 0"),
        (("hosts",), 2.5, "expected hosts to be an integer"),
        (("host", "memroy"), {}, "unknown key 'memroy'"),
        (("host", "ranks"), None, "the key 'ranks' is missing"),
        (("host", "memory", "size"), "big", "expected a size in bytes"),
        (("host", "memory", "bytes_per_s"), "24 GiB", "expected a rate, got '24 GiB'"),
        (("host", "flops_per_s", "bf16"), 0.0, "expected bf16 to be a number > 0"),
        (("host", "flops_per_s"), {"fp32": 1e9, "fp16": 1e9}, "the key 'bf16' is missing"),
        (("network", "latency_s"), -1.0, "expected latency_s to be a number >= 0"),
        (("network",), None, "expected a network for several hosts"),
        (("network", "fan_out"), 8, "add store"),
        (("network", "fan_out"), 1, "expected fan_out to be a number >= 2"),
        (("host", "accelerator"), {"memory": "40GB"}, "add store"),
        (("description",), None, "the key 'description' is missing"),
    ],
)
def test_errors_name_the_wrong_key(tmp_path, path, value, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, changed(path, value))
    assert "cluster.yaml" in refused.value.where
    assert refused.value.remedy


def test_an_accelerator_on_the_network_needs_a_host_with_one_rank(tmp_path):
    document = changed(("host", "accelerator"), {"memory": "40GB"}) | {"store": STORE}
    with pytest.raises(ConfigError, match="write ranks: 1"):
        load(tmp_path, document)


def test_an_unknown_cluster_file_name():
    with pytest.raises(ConfigError, match="no cluster file 'two_core'") as refused:
        find_cluster("two_core")
    assert "two_cores" in refused.value.remedy


@pytest.mark.parametrize("text", ["[1, 2]", "hosts: [", "just text"])
def test_a_cluster_file_that_is_not_a_mapping(tmp_path, text):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="cluster file"):
        load_cluster(file)
