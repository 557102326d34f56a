"""The free memory: that of the machine, or less if a container or a limit confines the process."""

import subprocess
import sys

import pytest

from headwater.core.units import GIB, MIB
from headwater.core.warn_once import warn_once
from headwater.plan import machine
from headwater.plan.cgroups import Group, Level, memory_groups, memory_room
from headwater.plan.machine import free_host_bytes, free_resources, warn_of_budgets
from headwater.plan.types import Resources

V2_MOUNT = "31 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 31 0:27 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
CPU_MOUNT = "33 31 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
ROOT_MOUNT = "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw"
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def tree(tmp_path):
    """Return a function that makes `/proc/self` and control groups: `tree(cgroup, mounts, files)`."""

    def make(cgroup, mounts, files):
        texts = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join([ROOT_MOUNT, *mounts])} | files
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


def v2(folder, limit, used, inactive=0, high="max"):
    return {
        f"sys/fs/cgroup/{folder}/memory.max": limit,
        f"sys/fs/cgroup/{folder}/memory.high": high,
        f"sys/fs/cgroup/{folder}/memory.current": used,
        f"sys/fs/cgroup/{folder}/memory.stat": f"anon {used}\ninactive_file {inactive}",
    }


def v1(folder, limit, used, inactive=0):
    return {
        f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes": limit,
        f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes": used,
        f"sys/fs/cgroup/memory/{folder}/memory.stat": f"cache 7\ntotal_inactive_file {inactive}",
    }


def test_v2_room_is_the_limit_minus_use_without_the_cache(tree):
    root = tree("0::/job", [V2_MOUNT.format(root="/")], v2("job", 8 * GIB, 3 * GIB, inactive=GIB))
    assert memory_room(root) == 6 * GIB


def test_the_tightest_level_of_the_hierarchy_binds(tree):
    files = v2("slice/job", "max", 3 * GIB) | v2("slice", 4 * GIB, 3 * GIB) | v2(".", "max", 9 * GIB)
    assert memory_room(tree("0::/slice/job", [V2_MOUNT.format(root="/")], files)) == GIB


def test_the_memory_high_limit_of_a_group_is_respected(tree):
    root = tree("0::/job", [V2_MOUNT.format(root="/")], v2("job", 8 * GIB, GIB, high=2 * GIB))
    assert memory_room(root) == GIB


def test_a_container_may_see_its_group_as_the_root(tree):
    root = tree("0::/", [V2_MOUNT.format(root="/")], v2(".", 2 * GIB, GIB))
    assert memory_room(root) == GIB


def test_a_container_may_mount_a_part_of_the_hierarchy(tree):
    mount = V2_MOUNT.format(root="/docker/abc")
    assert memory_room(tree("0::/docker/abc/job", [mount], v2("job", 2 * GIB, GIB))) == GIB
    assert memory_room(tree("0::/elsewhere", [mount], v2(".", 3 * GIB, GIB))) == 2 * GIB


def test_v1_groups_are_found_by_their_controller(tree):
    cgroup = "9:cpu:/other\n4:memory:/slice/job\n1:name=systemd:/\n0::/job"
    files = v1("slice/job", UNLIMITED_V1, 3 * GIB) | v1("slice", 4 * GIB, 3 * GIB, inactive=MIB)
    root = tree(cgroup, [CPU_MOUNT, V1_MOUNT.format(root="/")], files)
    assert memory_room(root) == GIB + MIB


def test_a_group_over_its_limit_has_no_room(tree):
    assert memory_room(tree("0::/job", [V2_MOUNT.format(root="/")], v2("job", GIB, 2 * GIB))) == 0


@pytest.mark.parametrize("files", [{}, v2("job", "max", GIB)])
def test_without_a_limit_no_room_is_returned(tree, files):
    assert memory_room(tree("0::/job", [V2_MOUNT.format(root="/")], files)) is None


def test_without_proc_no_limit_applies(tmp_path):
    assert memory_room(tmp_path) is None


def test_mounts_with_spaces_and_many_fields_are_parsed():
    mount = r"31 23 0:26 /a\040b /mnt/c\040d rw shared:1 master:2 - cgroup2 cgroup2 rw"
    (group,) = memory_groups("0::/a b/job", mount)
    assert group == Group(group.mount, group.mount / "job", 2)
    assert str(group.mount) == "/mnt/c d"


def test_a_container_lowers_the_budget(monkeypatch):
    used = 2 * machine.resident_bytes()
    monkeypatch.setattr(machine, "memory_levels", lambda: [Level(used + 10 * MIB, used, used)])
    budget = free_resources(Resources(), "cpu").host_memory
    assert budget == pytest.approx(machine.resident_bytes() + 9 * MIB, abs=2 * MIB)


@pytest.mark.real_start
def test_a_limit_of_the_address_space_lowers_the_budget():
    script = (
        "import resource, psutil; from headwater.plan.machine import free_host_bytes;"
        "resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (64 << 20),) * 2);"
        "print(free_host_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 64 * MIB < free_host_bytes()


def test_budgets_set_by_the_user_are_kept(tmp_path):
    asked = Resources(host_memory=1, disk=tmp_path, disk_bytes=2)
    assert free_resources(asked, "cpu") == asked
    assert free_resources(Resources(), "cpu").host_memory > 0


def test_a_budget_beyond_the_gpu_gives_a_note(monkeypatch, caplog):
    warn_once.cache_clear()
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (20 << 30, 24 << 30))
    warn_of_budgets(Resources(host_memory=1 << 30, device_memory=64 << 30), "cuda")
    assert caplog.messages == [
        "device_memory is 64.0 GiB, but the GPU has 24.0 GiB: a run that needs more than that fails here"
    ]
