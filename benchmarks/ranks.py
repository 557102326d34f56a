"""Several compute ranks on this machine: `python -m benchmarks.ranks --rounds 3`.

Strong scaling compares as many ranks as cores, with one thread each, with one rank on all cores, at the same
global batch. Weak scaling compares them with one rank with one thread, at the batch of a rank. The limit of
the machine is measured too: as many independent runs at once. Memory is the resident memory of all processes
of a run at its peak, with shared pages counted once.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch

from benchmarks.runner import print_table, save
from benchmarks.workload import Workload, add_workload_arguments, workload_of

_SAMPLE_EVERY_S = 0.2


def write_data(folder: Path, workload: Workload) -> None:
    """Write random tokens in the format of `GptHDF5MapDataProcessor`."""
    tokens = torch.cat([workload.tokens(index) for index in range(workload.rotate)]).numpy()
    samples = np.stack([tokens[:, :-1], np.ones_like(tokens[:, 1:]), tokens[:, 1:]], axis=1).astype(np.int32)
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("data", data=samples)
        file.attrs["n_examples"] = len(samples)


def params(workload: Workload, data: Path, batch: int, backend: Mapping[str, object]) -> dict[str, object]:
    """Return a params file for the workload."""
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
    }
    return {"trainer": {"init": init, "fit": {"train_dataloader": loader}}}


def run(
    workload: Workload, data: Path, *, ranks: int, threads: int, batch: int, backend: Mapping[str, object]
) -> dict[str, float]:
    """Run once in separate processes; return tokens per second, peak of memory and last loss."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(json.dumps(params(workload, data, batch, backend)))
        command = [
            sys.executable, "-m", "headwater", "fit", str(file),
            "--model_dir", f"{folder}/run", "--num_csx", str(ranks),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        peak = 0
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            while process.poll() is None:
                peak = max(peak, _resident(process.pid))
                time.sleep(_SAMPLE_EVERY_S)
        if process.returncode:
            raise RuntimeError(Path(folder, "log").read_text()[-3000:])
        lines = Path(folder, "run/history.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "train"][workload.warmup :]
    return {
        "tokens_per_s": statistics.median(step["tokens"] / step["step_s"] for step in steps),
        "peak_bytes": peak,
        "last_loss": steps[-1]["loss"],
    }


def run_at_once(count: int, workload: Workload, data: Path, **case: Any) -> dict[str, float]:
    """Run independent runs at once; return total tokens per second, largest peak and one last loss."""
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda _: run(workload, data, **case), range(count)))
    return {
        "tokens_per_s": sum(result["tokens_per_s"] for result in results),
        "peak_bytes": max(result["peak_bytes"] for result in results),
        "last_loss": results[0]["last_loss"],
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", help="a folder; the runs then use the disk tier there")
    parser.add_argument("--host_memory", help="limit of all ranks of a run together, such as 2GiB")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    workload = workload_of(args)
    cores = len(os.sched_getaffinity(0))
    backend: dict[str, object] = {}
    if args.disk:
        backend = {"disk": {"path": args.disk}, "tier": "disk"}
    if args.host_memory:
        backend["host_memory"] = args.host_memory
    cases = {
        f"1 rank x {cores} threads": {"ranks": 1, "threads": cores, "batch": workload.batch},
        f"{cores} ranks x 1 thread": {"ranks": cores, "threads": 1, "batch": workload.batch},
        "1 rank x 1 thread": {"ranks": 1, "threads": 1, "batch": workload.batch // cores},
    }
    apart = f"{cores} runs x 1 thread"
    cases[apart] = cases["1 rank x 1 thread"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        write_data(Path(folder), workload)
        for number in range(args.rounds):
            for name, case in cases.items():
                count = cores if name == apart else 1
                result = run_at_once(count, workload, Path(folder), backend=backend, **case)
                results[name].append(result)
                print(
                    f"round {number + 1}/{args.rounds}  {name:22s} {result['tokens_per_s']:8.1f} tokens/s  "
                    f"{result['peak_bytes'] / 2**30:5.2f} GiB  loss {result['last_loss']:.4f}",
                    flush=True,
                )
    whole, many, single, several = results.values()

    def ratio(key: str, of: list[dict[str, float]], over: list[dict[str, float]], times: int = 1) -> float:
        pairs = zip(of, over, strict=True)
        return round(statistics.median(mine[key] / (times * theirs[key]) for mine, theirs in pairs), 3)

    row = {
        "tier": "disk" if args.disk else "memory",
        "dtype": workload.dtype,
        "host_memory": args.host_memory or "all there is",
        "strong": ratio("tokens_per_s", many, whole),
        "weak": ratio("tokens_per_s", many, single, cores),
        "runs apart": ratio("tokens_per_s", several, single, cores),
        "weak of that": ratio("tokens_per_s", many, several),
        "memory": ratio("peak_bytes", many, whole),
    }
    print_table([row])
    budget = f"_{args.host_memory}" if args.host_memory else ""
    print(save(f"ranks_{row['tier']}_{workload.dtype}{budget}", {"rows": [row], "runs": results}))


if __name__ == "__main__":
    main()
