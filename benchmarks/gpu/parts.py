"""The parts of the measurements, each a list of rows in the order of their importance."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.rates import Rates
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.shapes import Load
from benchmarks.gpu.streaming_peers import NotInstalledError
from benchmarks.gpu.train import RESULT, measured
from benchmarks.runner import Row, reason_of
from headwater.core.units import MIB
from headwater.plan.machine import free_host_bytes

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)")
_LEAST_S = {"tiny": 0.0, "1.3B": 30.0, "8B": 60.0, "14B": 120.0, "20B": 150.0}
"""Seconds without which a run of a shape cannot end."""

_MOST_S = {"tiny": 60.0, "1.3B": 120.0, "8B": 170.0, "14B": 300.0, "20B": 400.0}
"""Seconds after which a run of a shape is ended, so that a system that hangs leaves time to the others."""

_LOOK_EVERY_S = 0.2

_LEAST_FREE_BYTES = 2 << 30
"""A run is ended when less host memory is free, or 2 % of it on a small machine."""

PEERS = ("megatrain", "roundpipe", "fsdp2", "deepspeed", "plain_compiled")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a part.

    Attributes:
        dry_run: measure tiny models on the CPU, to see that everything runs.
        disk: folder of disk tiers.
    """

    dry_run: bool
    disk: Path | None

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    def load(self, shape: str, **changes: Any) -> Load:
        """Return a load of a shape; in a dry run one of the tiny shape with few tokens."""
        load = Load(shape=shape, **changes)
        if not self.dry_run:
            return load
        steps = min(load.steps, 2)
        return dataclasses.replace(
            load, shape="tiny", device="cpu", sequence=16, batch=2, steps=steps, warmup=1
        )


def tests(rows: Rows, options: Options) -> None:
    """Part a: the tests that compare streaming on the GPU with plain PyTorch on the GPU, a row for each."""
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts="),
        # The GPU machine has other versions of packages, whose warnings must not fail a test.
        *("-o", "filterwarnings=default"),
        *("--timeout=200", "tests/stream/test_gpu.py"),
    ]
    if options.dry_run:
        command += ["-k", "memory-2_slabs-keep"]
    environment = _environment() | ({} if options.dry_run else {"HEADWATER_TEST_CUDA": "1"})
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        guard = _Guard(process, rows.left_s)
        output: list[str] = []
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            output.append(line)
            found = _TEST.match(line)
            if found:
                rows.add({"row": found[1], "outcome": found[2].lower()})
        guard.stop()
    code = process.returncode
    ended = {} if guard.reason is None else {"ended": guard.reason}
    row: Row = {"row": "all tests", "exit_code": code} | ended
    rows.add(row | ({"output": "".join(output[-80:])} if code else {}))


def rates(rows: Rows, options: Options) -> None:
    """Part b: the rates of the machine."""
    if options.dry_run:
        measures = Rates("cpu", copied=64 << 10, updated=1 << 10, products=(32, 32, 32)).rows()
    else:
        measures = Rates("cuda", copied=1024 * MIB, updated=256 * MIB, products=(8192, 8192, 8192)).rows()
    for name, run in measures.items():
        rows.measure(name, run)


def peers(rows: Rows, options: Options) -> None:
    """Part c: 1.3B and 8B, Headwater against other systems. The most important rows come first."""
    for sequence, batch in ((4096, 4), (1024, 64)):
        for shape in ("8B", "1.3B"):
            size, steps = f"{shape}, {batch} x {sequence}", 3 if shape == "8B" else 4
            load = options.load(shape, sequence=sequence, batch=batch, steps=steps)
            _trained(rows, options, f"headwater, {size}", "headwater", load)
            _trained(rows, options, f"headwater, compiled, {size}", "headwater_compiled", load)
            for peer in PEERS:
                # The state of 8B parameters with fp32 masters fits no other system in 128 GiB.
                dtype = "pure_bf16" if shape == "8B" or peer == "megatrain" else "bf16"
                other = dataclasses.replace(load, dtype=dtype)
                _trained(rows, options, f"{peer}, {dtype}, {size}", peer, other)
            _trained(rows, options, f"headwater, host memory, {size}", "headwater_memory", load)


def large(rows: Rows, options: Options) -> None:
    """Part d: models that no other system can hold in 128 GiB of host memory."""
    for shape in ("14B", "20B"):
        load = options.load(shape, sequence=4096, batch=4, steps=2, warmup=1)
        _trained(rows, options, f"headwater, {shape}", "headwater", load)


def curves(rows: Rows, options: Options) -> None:
    """Part e: losses of fp32 on the GPU and on the CPU, and the bits of two tiers on the GPU."""
    load = options.load("1.3B", sequence=512, batch=2, dtype="fp32", steps=20, warmup=0)
    on_cpu = dataclasses.replace(load, device="cpu")
    for name, system, each in (
        ("on the device, memory tier", "headwater_memory", load),
        ("on the device, disk tier", "headwater_disk", load),
        ("on the device, memory tier again", "headwater_memory", load),
        ("plain PyTorch on the device", "plain", load),
        ("on the CPU", "headwater_memory", on_cpu),
    ):
        _trained(rows, options, name, system, each)
    losses: dict[object, Any] = {row["row"]: row.get("losses") for row in rows.rows}
    rows.add(
        {
            "row": "comparison",
            **_difference("device_and_cpu", losses, "on the device, memory tier", "on the CPU"),
            **_difference("two_tiers", losses, "on the device, memory tier", "on the device, disk tier"),
            **_difference(
                "two_runs", losses, "on the device, memory tier", "on the device, memory tier again"
            ),
        }
    )


PARTS: dict[str, Callable[[Rows, Options], None]] = {
    "a": tests,
    "b": rates,
    "c": peers,
    "d": large,
    "e": curves,
}


def _difference(name: str, losses: dict[object, Any], first: str, second: str) -> Row:
    """Return the largest relative difference of two loss curves, and whether all bits are equal."""
    one, other = losses.get(first), losses.get(second)
    if one is None or other is None:
        return {name: "one of the two was not measured"}
    largest = max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
    return {name: {"largest_relative_difference": largest, "equal_bits": one == other}}


def _trained(rows: Rows, options: Options, name: str, system: str, load: Load) -> None:
    train = functools.partial(_in_process if options.dry_run else _in_child, rows, options, system, load)
    rows.measure(name, train, _LEAST_S[load.shape])


def _in_process(rows: Rows, options: Options, system: str, load: Load) -> Row:
    try:
        return measured(system, load, options.disk)
    except NotInstalledError as error:
        return {"left_out": str(error)}


def _in_child(rows: Rows, options: Options, system: str, load: Load) -> Row:
    """Train in a separate process, so that nothing of a system that fails is left."""
    with tempfile.TemporaryDirectory(prefix="headwater-gpu-", dir=options.disk) as folder:
        command = [
            *(sys.executable, "-m", "benchmarks.gpu.train", f"--system={system}"),
            *(f"--disk={folder}", *load.options()),
        ]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        ) as process:
            guard = _Guard(process, min(rows.left_s, _MOST_S[load.shape]))
            stdout, stderr = process.communicate()
            guard.stop()
    found = [line for line in stdout.splitlines() if line.startswith(RESULT)]
    if process.returncode or not found:
        if NotInstalledError.__name__ in stderr:
            return {"left_out": reason_of(stderr, process.returncode)}
        print(stderr[-6000:], file=sys.stderr, flush=True)
        if process.returncode == -signal.SIGKILL:
            return {"failed": f"ended: {guard.reason or 'by the kernel, perhaps for lack of memory'}"}
        return {"failed": reason_of(stderr, process.returncode), "stderr": stderr[-1500:]}
    row: Row = json.loads(found[-1].removeprefix(RESULT))
    return row


class _Guard:
    """Ends a process, with those that it has started, after some time or when memory becomes scarce.

    Otherwise the kernel would end this process too. A limit of the address space is not used instead, because
    CUDA reserves more addresses than the machine has memory.

    Attributes:
        reason: the reason why the process was ended; `None` if it was not.

    Args:
        process: the leader of its group.
        seconds: time after which it is ended.
    """

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self.reason: str | None = None
        self._process, self._seconds = process, max(seconds, 1.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        end_s, least = time.monotonic() + self._seconds, psutil.virtual_memory().total // 50
        while self.reason is None and not self._stopped.wait(_LOOK_EVERY_S):
            if time.monotonic() > end_s:
                self.reason = f"it took more than {self._seconds:.0f} s"
            elif free_host_bytes() < min(least, _LEAST_FREE_BYTES):
                self.reason = "it needs more host memory than the machine has"
        if self.reason is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Watch the process no longer."""
        self._stopped.set()
        self._thread.join()


def _environment() -> dict[str, str]:
    paths = (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
