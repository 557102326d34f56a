"""The calibration measures the machine, caches the rates, and measures again when they are in doubt."""

import dataclasses
import errno
import json
import logging
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

from children import exit_code_of_child
from headwater.core.attention import attention_kernel_available
from headwater.core.errors import ConfigError
from headwater.core.modes import converts_half_products
from headwater.core.units import MIB
from headwater.plan import calibrate as module
from headwater.plan import machine_cache, measuring, probes
from headwater.plan.calibrate import Known
from headwater.plan.machine import resident_bytes
from headwater.plan.measuring import measure_apart
from headwater.plan.probes import Measurement, Probe, Timing, measure, time_probes
from headwater.plan.rates import Calibration
from headwater.plan.update_probe import StageOfAllKinds
from headwater.store.native_check import adam_in_use, checked_adam
from known_rates import KnownRates

RATES = Calibration(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
DAY_S = 86_400.0


def taken(fp32=1.0, quick_s=0.02, cpu_share=1.0):
    return Measurement(dataclasses.replace(RATES, fp32_flops_per_s=fp32), quick_s, cpu_share)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Make this a process without measured rates; restore them afterwards."""
    monkeypatch.setattr(module, "_IN_THIS_PROCESS", {})


@pytest.fixture
def machine(monkeypatch):
    """Return a machine with given measurements, which tests set in `measurements` and `quick`."""

    class Machine:
        measurements: list[Measurement] = []  # noqa: RUF012
        quick = Timing({"quick": 0.02}, 1.0)
        now_s = 1e9

    monkeypatch.setattr(module, "measure_apart", lambda *_, **__: Machine.measurements.pop(0))
    monkeypatch.setattr(module, "time_quick", lambda _: Machine.quick)
    monkeypatch.setattr(module.time, "time", lambda: Machine.now_s)
    return Machine


def calibrate(cache=None, **arguments):
    """Return the rates that a new process finds; `cache` is the file of stored measurements."""
    module._IN_THIS_PROCESS.clear()
    with nullcontext() if cache is None else mock.patch.object(module, "cache_file", return_value=cache):
        return module.calibrate(**arguments)


def test_every_rate_of_a_cpu_is_measured_and_no_file_is_left(tmp_path):
    rates = dataclasses.asdict(measure("cpu", tmp_path).rates)
    assert rates.pop("link_bytes_per_s") is None
    if not attention_kernel_available():
        assert rates.pop("kernel_attention_flops_per_s") is None
    # fp16 is emulated on most CPUs; its slowest rate is some MB/s on an idle core.
    assert all(1e4 < rate < 1e16 for rate in rates.values()), rates
    assert not list(tmp_path.iterdir())


def test_probes_alternate_and_the_best_time_is_used(monkeypatch):
    turns, now_s = [], [0.0]
    took_s = iter([8.0, 8.0, 2.0, 8.0, 8.0, 8.0])

    def run_slowly():
        turns.append("slow")
        now_s[0] += next(took_s) / 1000

    clock = SimpleNamespace(perf_counter=lambda: now_s[0], process_time=lambda: now_s[0])
    monkeypatch.setattr(probes, "time", clock)
    slow = Probe(run_slowly, on_cores=False)
    timing = time_probes({"slow": slow, "fast": Probe(lambda: turns.append("fast"), on_cores=False)})
    assert turns[:4] == ["slow", "fast", "slow", "fast"]
    assert timing.best_s == {"slow": pytest.approx(0.002), "fast": 0.0}


@pytest.mark.parametrize(("products_s", "other_s"), [(5.0, 2.0), (7.5, 0.5)])
def test_a_block_s_own_products_and_attention_do_not_count_as_other_work(products_s, other_s):
    best_s = {"block bf16": 10.0, "products of block bf16": products_s, "attention of block bf16": 3.0}
    assert probes._other_s(best_s, "bf16") == other_s  # at least a twentieth of the block


def test_a_process_that_waits_for_cores_is_on_a_busy_machine():
    assert not time_probes({"waits": Probe(lambda: time.sleep(0.01), on_cores=True)}).quiet
    assert time_probes({"waits": Probe(lambda: time.sleep(0.01), on_cores=False)}).quiet


def test_a_known_machine_is_not_measured_again(tmp_path, machine):
    machine.measurements = [taken()]
    first = calibrate(disk=tmp_path, cache=tmp_path / "cache.json")
    assert calibrate(disk=tmp_path / "not" / "yet", cache=tmp_path / "cache.json") == first


def with_disk(measurement, rate):
    return dataclasses.replace(
        measurement, rates=dataclasses.replace(measurement.rates, disk_read_bytes_per_s=rate)
    )


def test_rates_are_those_of_the_least_disturbed_measurement_whatever_its_folder(tmp_path, machine):
    cache = tmp_path / "cache.json"
    machine.measurements = [taken(1.0, cpu_share=0.85), with_disk(taken(2.0, cpu_share=0.9), 5.0)]
    assert calibrate(cache=cache).fp32_flops_per_s == 1.0
    assert calibrate(disk=tmp_path, cache=cache).fp32_flops_per_s == 2.0
    found = calibrate(cache=cache)
    assert (found.fp32_flops_per_s, found.disk_read_bytes_per_s) == (2.0, None)


def test_a_new_measurement_replaces_those_with_other_folders(tmp_path, machine):
    cache = tmp_path / "cache.json"
    machine.measurements = [with_disk(taken(2.0, cpu_share=0.9), 5.0), taken(3.0, cpu_share=0.85)]
    calibrate(disk=tmp_path, cache=cache)
    for recalibrate in (True, False):
        assert calibrate(cache=cache, recalibrate=recalibrate).fp32_flops_per_s == 3.0
    machine.measurements = [with_disk(taken(4.0, cpu_share=0.8), 6.0)]
    found = calibrate(disk=tmp_path, cache=cache)
    assert (found.fp32_flops_per_s, found.disk_read_bytes_per_s) == (3.0, 6.0)


@pytest.mark.parametrize(
    "other",
    [taken(2.0, quick_s=0.04), taken(2.0, cpu_share=0.7)],
    ids=["another speed", "a busy machine"],
)
def test_a_measurement_with_another_folder_must_be_like_the_present_one(other, tmp_path, machine):
    cache = tmp_path / "cache.json"
    machine.measurements = [other, taken(1.0, cpu_share=0.85)]
    calibrate(disk=tmp_path, cache=cache)
    assert calibrate(cache=cache).fp32_flops_per_s == 1.0


def test_rates_that_were_measured_with_another_kernel_of_adam_are_not_used(tmp_path, machine, monkeypatch):
    cache = tmp_path / "rates.json"
    machine.measurements = [taken(1.0), taken(2.0)]
    for kernel, rate in (("native 1", 1.0), ("torch", 2.0), ("native 1", 1.0)):
        monkeypatch.setattr(module, "adam_in_use", lambda kernel=kernel: kernel)
        assert calibrate(cache=cache).fp32_flops_per_s == rate


def test_the_kernel_of_adam_has_a_name_that_changes_with_its_source():
    name, digest = adam_in_use().split()
    assert name == "native" and len(digest) == 12


def test_updates_are_measured_with_the_kernel_that_a_run_uses(monkeypatch):
    kernel, updated = checked_adam(), []
    run = type(kernel).run

    def counted(kernel, pieces, settings):
        updated.extend((piece.encoding, piece.numel) for piece in pieces)
        run(kernel, pieces, settings)

    monkeypatch.setattr(type(kernel), "run", counted)
    stage = StageOfAllKinds(3000)
    updated.clear()
    stage.update()
    assert sorted(updated) == [(0, 1500), (1, 1500)], "each way to store a master"
    # fp32: 28 bytes, bf16: 26.
    assert stage.moved_bytes == pytest.approx(1500 * (28 + 26), rel=0.2), "rounded up to pages"


def test_a_recent_measurement_is_used_without_a_check(tmp_path, machine):
    machine.measurements = [taken(1.0, cpu_share=BUSY), taken(9.0)]
    for wait_s, rate in ((0, 1.0), (500, 1.0), (200, 9.0)):
        machine.now_s += wait_s
        assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == rate


@pytest.mark.parametrize("days", [31, -1])
def test_an_old_or_future_measurement_is_repeated(tmp_path, machine, days):
    machine.measurements = [taken(1.0), taken(9.0)]
    calibrate(cache=tmp_path / "cache.json")
    machine.now_s += days * DAY_S
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 9.0


BUSY, QUIET = 0.5, 1.0


@pytest.mark.parametrize(
    ("then", "now_s", "now", "holds"),
    [
        (QUIET, 0.021, QUIET, True),
        (QUIET, 0.05, QUIET, False),  # slower on a quiet machine: this is another machine
        (QUIET, 0.2, BUSY, True),  # slower because the machine is busy now
        (QUIET, 0.01, QUIET, False),  # faster: the earlier measurement was too slow
        (QUIET, 0.01, BUSY, False),
        (BUSY, 0.02, BUSY, True),
        (BUSY, 0.02, QUIET, False),  # the machine is quiet now: measure again
    ],
)
def test_a_quick_check_decides_if_a_measurement_still_holds(then, now_s, now, holds):
    known = Known(taken(quick_s=0.02, cpu_share=then), taken_s=0.0)
    assert known.holds(Timing({"quick": now_s}, now)) == holds


def test_a_busy_measurement_is_used_for_an_hour_with_a_warning(tmp_path, machine, caplog):
    machine.measurements = [taken(1.0, cpu_share=BUSY), taken(9.0)]
    machine.quick = Timing({"quick": 0.02}, BUSY)
    with caplog.at_level(logging.WARNING):
        assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0
    assert "50 % of its cores" in caplog.text
    machine.now_s += 3000
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0
    machine.now_s += 3000
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 9.0


def test_a_busy_measurement_does_not_replace_a_quiet_one(tmp_path, machine):
    machine.measurements = [taken(1.0), taken(9.0, cpu_share=BUSY), taken(5.0)]
    calibrate(cache=tmp_path / "cache.json")
    machine.now_s += 31 * DAY_S
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 5.0  # and it is tried again


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"machine": {"fp32_flops_per_s": 1.0}}', '{"machine": {"rates": {}, "quick_s": 1.0}}'],
)
def test_with_a_damaged_or_old_cache_the_machine_is_measured(tmp_path, machine, damage):
    cache = tmp_path / "cache.json"
    cache.write_text(damage)
    machine.measurements = [taken(2.0)]
    assert calibrate(cache=cache).fp32_flops_per_s == 2.0
    (entry,) = json.loads(cache.read_text()).values()
    assert entry["rates"]["fp32_flops_per_s"] == 2.0


def test_recalibrate_measures_again_even_on_a_busy_machine(tmp_path, machine):
    machine.measurements = [taken(1.0), taken(9.0, cpu_share=BUSY)]
    calibrate(cache=tmp_path / "cache.json")
    assert calibrate(cache=tmp_path / "cache.json", recalibrate=True).fp32_flops_per_s == 9.0


def test_an_unusable_home_causes_a_warning(tmp_path, machine, caplog):
    (tmp_path / "home").write_text("a file where a folder should be")
    machine.measurements = [taken(1.0), taken(2.0)]
    with caplog.at_level(logging.WARNING):
        assert calibrate(cache=tmp_path / "home" / "cache.json").fp32_flops_per_s == 1.0
    assert "XDG_CACHE_HOME" in caplog.text
    assert calibrate(cache=tmp_path / "home" / "cache.json").fp32_flops_per_s == 2.0


def test_a_user_without_a_home_has_no_cache(machine, monkeypatch):
    def no_home():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", no_home)
    machine.measurements = [taken(1.0), taken(2.0)]
    assert [calibrate().fp32_flops_per_s, calibrate().fp32_flops_per_s] == [1.0, 2.0]


def test_an_error_names_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(ConfigError, match="file"):
        calibrate(disk=file, cache=tmp_path / "cache.json")


def test_a_process_measures_only_once(tmp_path, machine):
    machine.measurements = [taken(1.0)]
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0
    machine.now_s += 40 * DAY_S
    assert module.calibrate().fp32_flops_per_s == 1.0


def test_a_measurement_that_fails_is_not_tried_again_by_this_process(tmp_path, machine):
    machine.measurements = [None]
    assert calibrate(cache=tmp_path / "cache.json") is None
    assert module.calibrate() is None


def test_old_rates_are_used_if_a_measurement_fails(tmp_path, machine):
    machine.measurements = [taken(1.0), None]
    calibrate(cache=tmp_path / "cache.json")
    machine.now_s += 31 * DAY_S
    assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0


def test_measurements_in_another_process_equal_those_in_this_one(tmp_path):
    rates = dataclasses.asdict(measure_apart("cpu", tmp_path, most_wall_s=300).rates)
    assert rates["disk_read_bytes_per_s"] > 1e6
    assert not list(tmp_path.iterdir())


def test_a_measurement_ends_at_its_limit(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert measure_apart("cpu", tmp_path, most_wall_s=0.01) is None
    assert "was not finished after 0.01 s" in caplog.text
    assert not list(tmp_path.iterdir())


ENDLESS = """
import os, time
from headwater.plan import measuring

def endless(device, folder):
    print(os.getpid(), flush=True)
    time.sleep(300)

measuring.measure = endless
measuring.main()
"""

MEASURES_ENDLESSLY = """
import resource
import subprocess
from headwater.plan import measuring

def run(*args, capture_output, **options):  # its output is this script's, so that the test can read it
    return subprocess.Popen(*args, stdin=options["stdin"]).wait()

measuring.__name__ = "endless_measuring"
measuring.subprocess.run = run
measuring.measure_apart("cpu", None)
"""


def test_a_measurement_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "endless_measuring.py").write_text(ENDLESS)
    command = [sys.executable, "-c", MEASURES_ENDLESSLY]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as parent:
        measuring_process = psutil.Process(int(parent.stdout.readline()))
        assert measuring_process.ppid() == parent.pid
        parent.kill()
    assert psutil.wait_procs([measuring_process], timeout=60)[1] == []


def test_a_measurement_needs_free_memory(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        assert measure_apart("cpu", None, budget=resident_bytes() + (100 << 20)) is None
        monkeypatch.setattr(measuring, "free_host_bytes", lambda budget: 50 << 20)
        assert measure_apart("cpu", None) is None
    assert "50.0 MiB are free" in caplog.text


def test_a_slow_dtype_is_measured_with_small_products(monkeypatch):
    monkeypatch.setattr(probes, "_SLOW_S", 0.0)
    assert probes._sizes("cpu", probes._DTYPES["fp16"]).matrices == probes._SLOW_MATRIX_SHAPES
    monkeypatch.setattr(probes, "_SLOW_S", float("inf"))
    assert probes._sizes("cpu", probes._DTYPES["fp16"]).matrices == probes._MATRIX_SHAPES


def test_a_trial_that_is_disturbed_once_does_not_make_a_dtype_slow(monkeypatch):
    times = iter([0.0, 9.0, 9.0, 9.001, 10.0, 10.0 + 1e-6])  # 9 s, 1 ms and 1 µs
    monkeypatch.setattr(probes.time, "thread_time", lambda: next(times))
    before = torch.get_num_threads()
    assert probes._sizes("cpu", torch.float32).matrices == probes._MATRIX_SHAPES
    assert torch.get_num_threads() == before


def test_a_gpu_is_measured_with_the_shapes_of_large_models(monkeypatch):
    def products(free_bytes):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_bytes, 140 << 30))
        sizes = probes._sizes("cuda", torch.bfloat16)
        rows, inner, columns = sizes.matrices[0]
        widest = 4 * 2 * (rows * inner + inner * columns + rows * columns)  # fp32, with gradients
        return sum(map(probes._flops, sizes.matrices)), widest

    large, small = products(130 << 30), products(6 << 30)
    assert large[0] > 2e12, "at 8e14 FLOP/s a product takes longer than its launch"
    assert 1e11 < small[0] < large[0]
    assert small[1] < 1 << 30 and large[1] < 4 << 30


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp32_flops_per_s", "fast"),
        ("fp32_flops_per_s", 0.0),
        ("memory_bytes_per_s", float("nan")),
        ("adamw_params_per_s", None),
        ("disk_read_bytes_per_s", -1.0),
        ("quick_s", 0.0),
    ],
)
def test_a_stored_rate_that_no_measurement_gives_is_not_used(tmp_path, machine, key, value):
    cache = tmp_path / "cache.json"
    machine.measurements = [taken(1.0), taken(2.0)]
    calibrate(cache=cache)
    ((name, entry),) = json.loads(cache.read_text()).items()
    (entry if key in entry else entry["rates"])[key] = value
    cache.write_text(json.dumps({name: entry}))
    machine.now_s += DAY_S
    assert calibrate(cache=cache).fp32_flops_per_s == 2.0


def test_rates_that_another_process_stores_meanwhile_stay(tmp_path, machine, monkeypatch):
    cache = tmp_path / "cache.json"

    def measured_while_another_process_stores(*_, **__):
        entry = dataclasses.asdict(taken(3.0)) | {"taken_s": machine.now_s}
        cache.write_text(json.dumps({"another disk": entry}))
        return taken(1.0)

    monkeypatch.setattr(module, "measure_apart", measured_while_another_process_stores)
    calibrate(cache=cache)
    stored = json.loads(cache.read_text())
    assert len(stored) == 2
    assert stored["another disk"]["rates"]["fp32_flops_per_s"] == 3.0


def test_a_full_disk_causes_a_warning_and_leaves_no_file(tmp_path, machine, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", full)
    machine.measurements = [taken(1.0)]
    with caplog.at_level(logging.WARNING):
        assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == 1.0
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_rates_with_and_without_the_kernel_of_attention_are_apart(tmp_path, machine, monkeypatch):
    machine.measurements = [taken(1.0), taken(2.0)]
    for available, rate in ((False, 1.0), (True, 2.0), (False, 1.0)):
        monkeypatch.setattr(
            machine_cache, "attention_kernel_available", lambda available=available: available
        )
        assert calibrate(cache=tmp_path / "cache.json").fp32_flops_per_s == rate


def test_the_rate_of_the_kernel_is_measured_if_it_is_used():
    rates = measure("cpu", None).rates
    assert (rates.kernel_attention_flops_per_s is not None) == attention_kernel_available()


def test_the_probe_of_new_pages_gets_new_ones_in_each_run():
    found = {}
    for name, probe in probes._new_pages().items():
        probe.run()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        probe.run()
        found[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    huge_page_bytes = 2 * MIB  # with them, there are fewer faults
    assert found["new pages"] >= 64 * MIB // huge_page_bytes
    assert found["old pages"] < found["new pages"] / 2


def test_rates_are_stored_for_each_choice_of_kernels(tmp_path, machine, monkeypatch):
    measured = []

    def measure(*_, **options):
        measured.append(options["kernels"])
        return machine.measurements.pop(0)

    monkeypatch.setattr(module, "measure_apart", measure)
    machine.measurements = [taken(1.0), taken(2.0)]
    for kernels, rate in (("exact", 1.0), ("converted", 2.0), ("exact", 1.0)):
        assert calibrate(kernels=kernels, cache=tmp_path / "cache.json").fp32_flops_per_s == rate
    assert measured == ["exact", "converted"]


def measure_with(kernels):
    used = []
    measuring.measure = lambda *_: used.append(converts_half_products()) or taken()
    sys.argv = ["measuring", str(os.getppid()), "cpu", "1", kernels]
    measuring.main()
    assert used == [kernels == "converted"]


@pytest.mark.parametrize("kernels", ["exact", "converted"])
def test_a_measurement_computes_with_the_kernels_of_the_run(kernels):
    assert exit_code_of_child(measure_with, kernels) == 0


def test_the_rates_that_tests_share_stay_recent(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "time_quick", None)
    cache, now_s = tmp_path / "cache.json", time.monotonic()
    module._store(cache, "key", Known(taken(cpu_share=0.5), time.time() - 599))
    rates = KnownRates(cache)
    rates.renew()  # too soon
    assert not module._read_cache(cache)["key"].needs_no_check(time.time() + 2)
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 250)
    rates.renew()
    known = module._read_cache(cache)["key"]
    assert known.measurement == taken(cpu_share=0.5) and known.needs_no_check(time.time() + 500)
    assert module._still_holds(known, "cpu")
