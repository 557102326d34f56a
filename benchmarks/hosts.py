"""Several hosts on one machine, measured and simulated: `python -m benchmarks.hosts --hosts 2`.

Each host is a network namespace with a core, which two hosts may share; `tc` limits the rate at which it
sends. The simulator gets the measured rates: those of all hosts at once, and that of the link as the engine
uses it. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.namespaces import Hosts, available
from benchmarks.options import at_least, end_on_sigterm
from benchmarks.ranks import params, write_data
from benchmarks.runner import FailedRunError, Row, print_table, reason_of, save
from benchmarks.workload import Workload, add_workload_arguments, workload_of

RATES = (100.0, 1000.0, None)
"""Megabits per second; the last is unlimited."""
EXCHANGES, EXCHANGED_BYTES = 5, 32 << 20
_LIMIT_S, _GRACE_S = 1800.0, 10.0
"""Seconds of a command on all hosts, and those for which the others continue after one has failed."""


def on_core(host: int) -> list[str]:
    """Return the prefix of a command that runs on the core of a host."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[host % len(cores)])]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(hosts: Hosts, words: Sequence[str]) -> list[list[str]]:
    """Return the command of each host."""
    return [
        [*on_core(host), sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts.count}",
         f"--node_rank={host}", "--nproc_per_node=1", f"--master_addr={hosts.address(0)}",
         "--master_port=29500", "-m", *words]
        for host in range(hosts.count)
    ]  # fmt: skip


def at_once(hosts: Hosts, commands: Sequence[Sequence[str]]) -> list[str]:
    """Run a command on each host and return the outputs. No process remains.

    Raises:
        FailedRunError: if one fails, or they take too long; the others are then ended.
    """
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        logs = [Path(name) / f"host{host}" for host in range(len(commands))]
        started = []
        try:
            for host, (command, log) in enumerate(zip(commands, logs, strict=True)):
                with log.open("w") as out:
                    started.append(
                        hosts.start(host, command, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT)
                    )
            end = time.monotonic() + _LIMIT_S
            while any(process.poll() is None for process in started) and time.monotonic() < end:
                if any(process.returncode for process in started):
                    end = min(end, time.monotonic() + _GRACE_S)
                time.sleep(0.1)
        finally:
            hosts.kill()
            codes = [process.wait() for process in started]
        printed = [log.read_text() for log in logs]
    for code, text in zip(codes, printed, strict=True):
        # A host that was killed here waited for one that failed, so its output does not have the reason.
        if code and (code > 0 or not any(other > 0 for other in codes)):
            reason = reason_of(text, code)
            raise FailedRunError(
                " ".join(commands[0][-3:]), "\n".join(each[-2000:] for each in printed), reason
            )
    return printed


def exchange() -> None:
    """Exchange bytes with all other hosts; the first host prints bytes per second and latency."""
    from headwater.fabric.cluster import join

    fabric = join()
    link = fabric.connect("a measurement")
    assert link is not None, "a rank for each host"

    def seconds(num_bytes: int, count: int) -> float:
        out, into = (torch.zeros(fabric.num_hosts, num_bytes, dtype=torch.uint8) for _ in range(2))
        times = []
        for _ in range(count):
            start = time.perf_counter()
            link.exchange(list(out), list(into))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    latency_s = seconds(1, 50)
    each = EXCHANGED_BYTES // (fabric.num_hosts - 1)
    rate = EXCHANGED_BYTES / (seconds(each, EXCHANGES) - latency_s)
    if fabric.rank == 0:
        print("link", json.dumps({"bytes_per_s": rate, "latency_s": latency_s}))


def calibrated(hosts: Hosts, file: Path, folder: Path) -> dict[str, Any]:
    """Return the cluster of hosts that are measured at the same time."""
    paths = [folder / f"host{host}.yaml" for host in range(hosts.count)]
    words = ["-m", "headwater", "plan", str(file), "--recalibrate", "--write_cluster"]
    at_once(hosts, [[*on_core(h), sys.executable, *words, str(path)] for h, path in enumerate(paths)])
    found = [yaml.safe_load(path.read_text()) for path in paths]
    return {**found[0], "hosts": hosts.count, "host": _mean([each["host"] for each in found])}


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return statistics.mean(values) if isinstance(values[0], float) else values[0]


def measured(hosts: Hosts, file: Path, folder: Path, workload: Workload) -> float:
    """Return the measured seconds of a step, the median."""
    words = ["headwater", "fit", str(file), "--num_csx", str(hosts.count), "--model_dir", str(folder / "run")]
    at_once(hosts, torchrun(hosts, words))
    lines = (folder / "run/history.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"][workload.warmup :]
    return float(statistics.median(step["step_s"] for step in steps))


def simulated(file: Path, cluster: dict[str, Any], folder: Path) -> float:
    """Return the simulated seconds of a step, as `headwater plan --cluster` computes them.

    Raises:
        FailedRunError: if the command fails.
    """
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    command = [sys.executable, "-m", "headwater", "plan", str(file), "--cluster", str(path)]
    done = subprocess.run(
        [*command, "--counts", str(cluster["hosts"]), "--out", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise FailedRunError("the simulation", done.stderr[-3000:], reason_of(done.stderr, done.returncode))
    found: float = json.loads((folder / "simulation.json").read_text())["points"][0]["step_s"]
    return found


def compare(count: int, megabits: float | None, file: Path, workload: Workload) -> Row:
    """Return a row of the table.

    Raises:
        FailedRunError: if a host fails.
    """
    link = shown(megabits)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name, Hosts(count, megabits) as hosts:
        folder = Path(name)
        print(f"{link}: rates of all hosts at once", flush=True)
        cluster = calibrated(hosts, file, folder)
        print(f"{link}: rate of the link", flush=True)
        (line,) = [
            line
            for text in at_once(hosts, torchrun(hosts, ["benchmarks.hosts", "--exchange"]))
            for line in text.splitlines()
            if line.startswith("link ")
        ]
        network = json.loads(line.removeprefix("link "))
        print(f"{link}: {workload.warmup + workload.steps} steps", flush=True)
        ours = measured(hosts, file, folder, workload)
        theirs = simulated(file, {**cluster, "network": network}, folder)
    return {
        "hosts": count,
        "link": link,
        "measured_bytes_per_s": f"{network['bytes_per_s'] / 1e6:.0f} MB/s",
        "step_s": round(ours, 3),
        "simulated_s": round(theirs, 3),
        "simulated/measured": round(theirs / ours, 2),
    }


def shown(megabits: float | None) -> str:
    """Return a rate as text."""
    return "unlimited" if megabits is None else f"{megabits:.0f} Mbit/s"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--hosts", type=at_least(2), default=2, help="number of hosts (%(default)s)")
    parser.add_argument("--exchange", action="store_true", help="run as a host whose link is measured")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.exchange:
        exchange()
        return 0
    if why := available():
        parser.error(why)
    end_on_sigterm()
    workload = workload_of(args)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        folder = Path(name)
        write_data(folder, workload)
        file = folder / "params.yaml"
        file.write_text(json.dumps(params(workload, folder, workload.batch, {})))
        rows: list[Row] = []
        for megabits in RATES:
            try:
                rows.append(compare(args.hosts, megabits, file, workload))
            except FailedRunError as error:
                print(error, file=sys.stderr, flush=True)
                rows.append({"hosts": args.hosts, "link": shown(megabits), "failed": error.reason})
            print(rows[-1], flush=True)
    print_table(rows)
    print(save(f"hosts_{args.hosts}", rows))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
