"""Several compute ranks on this machine: `python -m benchmarks.ranks --rounds 3`.

Strong scaling compares as many ranks as cores, with one thread each, with one rank on all cores, at the same
global batch. Weak scaling compares them with one rank with one thread, at the batch of a rank. The limit of
the machine is measured too: as many independent runs at once. Memory is the resident memory of all processes
of a run at its peak, with shared pages counted once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
import psutil
import torch

from benchmarks.options import end_on_sigterm, positive, size
from benchmarks.runner import FailedRunError, Row, print_table, reason_of, save
from benchmarks.workload import Workload, add_workload_arguments, workload_of

_SAMPLE_EVERY_S = 0.2
_END_S = 30
"""Seconds in which a run ends after SIGTERM, before it is killed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs that are measured at once.

    Attributes:
        ranks: ranks of each run.
        threads: threads of each rank.
        batch: global batch of each run.
        runs: number of independent runs.
        backend: further options of the backend.
        sparsity: the section `sparsity` of the params; no weight is masked if not given.
    """

    ranks: int
    threads: int
    batch: int
    runs: int = 1
    backend: Mapping[str, object] = dataclasses.field(default_factory=dict)
    sparsity: Mapping[str, object] | None = None


def write_data(folder: Path, workload: Workload) -> None:
    """Write random tokens in the format of `GptHDF5MapDataProcessor`."""
    tokens = torch.cat([workload.tokens(index) for index in range(workload.rotate)]).numpy()
    samples = np.stack([tokens[:, :-1], np.ones_like(tokens[:, 1:]), tokens[:, 1:]], axis=1).astype(np.int32)
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("data", data=samples)
        file.attrs["n_examples"] = len(samples)


def params(
    workload: Workload,
    data: Path,
    batch: int,
    backend: Mapping[str, object],
    sparsity: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return a params file for the workload, with masks if there is a section `sparsity`."""
    model = {
        "name": "gpt2",
        "hidden_size": workload.width,
        "num_hidden_layers": workload.layers,
        "num_heads": workload.heads,
        "vocab_size": workload.vocab,
        "max_position_embeddings": workload.sequence,
        "filter_size": 4 * workload.width,
        **dict.fromkeys(("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate"), 0.0),
    }
    loader = {
        "data_processor": "GptHDF5MapDataProcessor",
        "data_dir": str(data),
        "batch_size": batch,
        "shuffle": False,
        "num_workers": 0,
    }
    init = {
        "backend": {"backend_type": "CPU", **backend},
        "model": model,
        "optimizer": {"AdamW": {"learning_rate": 3e-4}},
        "precision": {"enabled": workload.dtype != "fp32", "fp16_type": "bfloat16"},
        "loop": {"max_steps": workload.warmup + workload.steps},
        "checkpoint": {"steps": 0},
        "logging": {"log_steps": 1},
        "seed": 1,
        **({"sparsity": sparsity} if sparsity else {}),
    }
    return {"trainer": {"init": init, "fit": {"train_dataloader": loader}}}


def run(
    workload: Workload, data: Path, case: Case, backend: Mapping[str, object], disk: Path | None
) -> dict[str, float]:
    """Run the runs of a case at once; return their tokens per second, largest peak and one last loss.

    Raises:
        FailedRunError: if one fails; the others are then ended.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headwater-bench-") as name,
        tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=disk) as tier,
    ):
        folders = [Path(name, str(number)) for number in range(case.runs)]
        for folder in folders:
            folder.mkdir()
            place = {"disk": {"path": f"{tier}/{folder.name}"}, "tier": "disk"} if disk else {}
            document = params(workload, data, case.batch, {**backend, **place, **case.backend}, case.sparsity)
            (folder / "params.yaml").write_text(json.dumps(document))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for folder in folders:
                processes.append(_start(folder, case))
            peaks = watch(processes)
        finally:
            end(processes)
        results = [_result(workload, *each) for each in zip(folders, processes, strict=True)]
    return {
        "tokens_per_s": sum(result["tokens_per_s"] for result in results),
        "peak_bytes": max(peaks),
        "last_loss": results[0]["last_loss"],
    }


def _start(folder: Path, case: Case) -> subprocess.Popen[bytes]:
    """Start the run of a folder."""
    command = [
        sys.executable, "-m", "headwater", "fit", str(folder / "params.yaml"),
        "--model_dir", f"{folder}/run", "--num_csx", str(case.ranks),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def watch(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return the peaks of memory when all runs have ended, or when one has failed."""
    peaks = [0] * len(processes)
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        peaks = [max(peak, _resident(each.pid)) for peak, each in zip(peaks, processes, strict=True)]
        time.sleep(_SAMPLE_EVERY_S)
    return peaks


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End runs that still run. Their ranks end with them."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _result(workload: Workload, folder: Path, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return tokens per second and last loss of a run that has ended.

    Raises:
        FailedRunError: if it failed.
    """
    printed = (folder / "log").read_text()
    if process.returncode:
        raise FailedRunError("headwater fit", printed[-3000:], reason_of(printed, process.returncode))
    lines = (folder / "run/history.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"][workload.warmup :]
    return {
        "tokens_per_s": statistics.median(step["tokens"] / step["step_s"] for step in steps),
        "last_loss": steps[-1]["loss"],
    }


def _resident(process: int) -> int:
    """Return the bytes of a process and its children, with shared pages counted once."""
    total = 0
    try:
        root = psutil.Process(process)
        for each in (root, *root.children(recursive=True)):
            total += each.memory_full_info().pss
    except psutil.Error:
        return 0  # a child has just ended
    return total


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_workload_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--disk", type=Path, help="a folder; the runs then use the disk tier there")
    parser.add_argument("--host_memory", type=size, help="limit of all ranks of a run together, such as 2GiB")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    workload = workload_of(args)
    cores = len(os.sched_getaffinity(0))
    if workload.batch % cores:
        parser.error(f"--batch: expected a multiple of the {cores} cores, found {workload.batch}")
    end_on_sigterm()
    if args.disk:
        args.disk.mkdir(parents=True, exist_ok=True)
    single = Case(1, 1, workload.batch // cores)
    cases = {
        f"1 rank x {cores} threads": Case(1, cores, workload.batch),
        f"{cores} ranks x 1 thread": Case(cores, 1, workload.batch),
        "1 rank x 1 thread": single,
        f"{cores} runs x 1 thread": dataclasses.replace(single, runs=cores),
        f"{cores} ranks x 1 thread, updates in backward": Case(
            cores, 1, workload.batch, backend={"updates": "in_backward"}
        ),
    }
    results, failures = measure(args, workload, cases)
    whole, many, one, several, ahead = results.values()
    row = {
        "tier": "disk" if args.disk else "memory",
        "dtype": workload.dtype,
        "host_memory": args.host_memory or "all there is",
        "strong": ratio("tokens_per_s", many, whole),
        "weak": ratio("tokens_per_s", many, one, cores),
        "runs apart": ratio("tokens_per_s", several, one, cores),
        "weak of that": ratio("tokens_per_s", many, several),
        "memory": ratio("peak_bytes", many, whole),
        "strong, updates in backward": ratio("tokens_per_s", ahead, whole),
        "memory, updates in backward": ratio("peak_bytes", ahead, whole),
    }
    print_table([row])
    failed: list[Row] = [{"case": name, "failed": reason} for name, reason in failures.items()]
    if failed:
        print_table(failed)
    budget = f"_{args.host_memory}" if args.host_memory else ""
    name = f"ranks_{row['tier']}_{workload.dtype}{budget}"
    print(save(name, {"rows": [row], "runs": results, "failures": failures}))
    return 1 if failures else 0


Runs = list[dict[str, float]]
"""The results of a case, by round."""


def measure(
    args: argparse.Namespace, workload: Workload, cases: Mapping[str, Case]
) -> tuple[dict[str, Runs], dict[str, str]]:
    """Run all cases in turn; return their results, and the reason of each case that failed.

    A case that fails is left out of later rounds, and has no results.
    """
    backend = {"host_memory": args.host_memory} if args.host_memory else {}
    results: dict[str, Runs] = {name: [] for name in cases}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        write_data(Path(folder), workload)
        for number in range(args.rounds):
            for name, case in cases.items():
                if name in failures:
                    continue
                try:
                    result = run(workload, Path(folder), case, backend, args.disk)
                except FailedRunError as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    failures[name] = error.reason
                    results[name] = []
                    continue
                results[name].append(result)
                print(
                    f"round {number + 1}/{args.rounds}  {name:22s} {result['tokens_per_s']:8.1f} tokens/s  "
                    f"{result['peak_bytes'] / 2**30:5.2f} GiB  loss {result['last_loss']:.4f}",
                    flush=True,
                )
    return results, failures


def ratio(key: str, of: Runs, over: Runs, times: int = 1) -> float | str:
    """Return the median of the ratios of each round; a dash if one of the two failed."""
    if not of or not over:
        return "–"
    pairs = zip(of, over, strict=True)
    return round(statistics.median(mine[key] / (times * theirs[key]) for mine, theirs in pairs), 3)


if __name__ == "__main__":
    sys.exit(main())
