"""Saving and loading of checkpoints against plain files: `python -m benchmarks.checkpoints --folder DIR`.

A Llama of transformers is trained for one step on each tier. Then its checkpoints are saved and loaded in
every format, round after round. After each of them, a plain file of as many bytes is written (with fsync) or
read, in large blocks, one after the other. The ratio of a row is the time of the plain file divided by the
row's time. Every read begins with no page of its files in the page cache.

A command also runs on a smaller model in each round, and the differences in time and bytes count: the
start of the command takes the same time for both models. `start busy s` is the processor time of that start:
of the command in a new process on the smaller model, less its bytes at the rate of the row. An import writes
no optimizer state, so only the bytes of the weights count. `busy s/GB` is the processor time of a row on all
threads, which depends less on other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import headwater as hw
from benchmarks.runner import is_part, print_table, save
from headwater.cli.main import main as headwater_main
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.store import WeightStore
from headwater.stream.detached import home_of

BYTES_PER_PARAMETER = 12
VOCABULARY = 8192
BLOCK_BYTES = 8 << 20
WRITE, READ, COPY = "write", "read", "copy"


class Disk:
    """Plain files in a folder, written and read in blocks, one after the other.

    Each is timed with the page cache and without it (O_DIRECT), and the shorter time counts.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "plain"
        self._block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT needs it
        self._block.write(os.urandom(BLOCK_BYTES))

    def write(self, num_bytes: int) -> float:
        """Return the seconds in which a file is written and synced."""
        return min(self._write(num_bytes, flags) for flags in (0, os.O_DIRECT))

    def read(self, num_bytes: int) -> float:
        """Return the seconds in which a file of `num_bytes` is read; it is written first if needed."""
        if not self._path.exists() or self._path.stat().st_size != _blocks(num_bytes) * BLOCK_BYTES:
            self._write(num_bytes, os.O_DIRECT)
        return min(self._read(flags) for flags in (0, os.O_DIRECT))

    def copy(self, num_bytes: int) -> float:
        """Return the seconds in which a file is read and another one is written."""
        return self.read(num_bytes) + self.write(num_bytes)

    def _write(self, num_bytes: int, flags: int) -> float:
        self._path.unlink(missing_ok=True)
        start = time.perf_counter()
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | flags)
        for _ in range(_blocks(num_bytes)):
            os.write(file, self._block)
        os.fsync(file)
        os.close(file)
        return time.perf_counter() - start

    def _read(self, flags: int) -> float:
        leave_cache(self._path)
        start = time.perf_counter()
        file = os.open(self._path, os.O_RDONLY | flags)
        while os.readv(file, [self._block]):
            pass
        os.close(file)
        return time.perf_counter() - start


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def leave_cache(path: Path) -> None:
    """Write a file, or all files of a folder, to the disk and remove them from the page cache."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def bytes_in(path: Path, pattern: str = "*") -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob(pattern))


def make_config(num_bytes: int) -> LlamaConfig:
    """Return a Llama whose weights and optimizer state take about `num_bytes`."""
    width = 1024 if num_bytes < 4 << 30 else 2048
    of_block = 4 * width**2 + 3 * width * 4 * width
    parameters = num_bytes / BYTES_PER_PARAMETER - 2 * VOCABULARY * width
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        # Two at least: commands are compared with a model of one layer.
        num_hidden_layers=max(2, round(parameters / of_block)),
        num_attention_heads=width // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        use_cache=False,
    )


def make_trained(config: LlamaConfig, tier: str, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that streams its weights, and its optimizer, after one step."""
    backend = hw.backend("CSX", tier=tier, disk=folder / "store")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    hw.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (1, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    store_of(model).flush()  # the update is not a part of the first save
    return model, optimizer


def store_of(model: nn.Module) -> WeightStore:
    home = home_of(next(model.parameters()))
    assert home is not None, "the model streams its weights"
    return home.store


class Timed(NamedTuple):
    """Seconds on the clock and of all processors, and bytes."""

    wall_s: float
    busy_s: float
    num_bytes: int

    def minus(self, other: Timed) -> Timed:
        """Return the differences."""
        return Timed(self.wall_s - other.wall_s, self.busy_s - other.busy_s, self.num_bytes - other.num_bytes)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: its name.
        use: the operation on the plain file: `write`, `read` or `copy`.
        files: the files whose bytes count.
        run: what is measured.
        sources: files that it reads; they leave the page cache first.
        target: a folder that it makes; it is removed first.
        smaller: the same with fewer bytes, which also runs; only the difference counts.
        pattern: names of the files whose bytes count.
        words: the command, if it is one.
    """

    name: str
    use: str
    files: Path
    run: Callable[[], object]
    sources: Path | None = None
    target: Path | None = None
    smaller: Row | None = None
    pattern: str = "*"
    words: tuple[str, ...] = ()

    def timed(self) -> Timed:
        """Run it once."""
        self._prepare()
        start, busy = time.perf_counter(), time.process_time()
        self.run()
        taken = time.perf_counter() - start, time.process_time() - busy
        return Timed(*taken, bytes_in(self.files, self.pattern))

    def timed_alone(self) -> Timed:
        """Run its command once, in a new process."""
        self._prepare()
        start, busy = time.perf_counter(), _busy_of_children()
        subprocess.run([sys.executable, "-m", "headwater", *self.words], check=True, capture_output=True)
        taken = time.perf_counter() - start, _busy_of_children() - busy
        return Timed(*taken, bytes_in(self.files, self.pattern))

    def _prepare(self) -> None:
        if self.target is not None:
            shutil.rmtree(self.target, ignore_errors=True)
        if self.sources is not None:
            leave_cache(self.sources)


def _busy_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_command(*words: str) -> None:
    """Run a command of Headwater in this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert headwater_main(list(words)) == 0


def rows_of_tier(tier: str, config: LlamaConfig, folder: Path) -> Iterator[Row]:
    """Yield the rows of one tier, in the order in which they are measured."""
    folder = folder / tier
    folder.mkdir()
    model, optimizer = make_trained(config, tier, folder)
    read = READ if tier == "memory" else COPY
    own, state, library = folder / "checkpoint_1", folder / "state.hw", folder / "library"

    def save_own() -> None:
        Snapshot(store_of(model), own, 1).run()

    def save_state() -> None:
        hw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)

    def load_state() -> None:
        found = hw.load(state)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def load_own() -> None:
        SavedCheckpoint(own).restore(store_of(model))

    yield Row(f"{tier}: checkpoint of a run, save", WRITE, own, save_own)
    yield Row(f"{tier}: checkpoint of a run, load", read, own, load_own, own)
    if tier == "memory":
        yield Row("checkpoint info --verify", READ, own, lambda: SavedCheckpoint(own).verify(), own)
    yield Row(f"{tier}: headwater.save", WRITE, state, save_state)
    yield Row(f"{tier}: headwater.load", read, state, load_state, state)
    yield Row(f"{tier}: save_pretrained", WRITE, library, lambda: hw.save_pretrained(model, library))
    yield Row(f"{tier}: load_pretrained", read, library, lambda: hw.load_pretrained(model, library), library)


def rows_of_commands(libraries: tuple[Path, Path], folder: Path) -> Iterator[Row]:
    """Yield the rows of the commands, which read one format and write the other.

    Args:
        libraries: folders in Hugging Face's format: a model, and a smaller one.
        folder: the folder of what the commands write.
    """
    commands = [_commands(library, folder / library.parent.name) for library in libraries]
    for large, smaller in zip(*commands, strict=True):
        yield dataclasses.replace(large, smaller=smaller)


def _commands(library: Path, folder: Path) -> tuple[Row, Row]:
    """Return the rows of an import of a folder, and of an export of the imported checkpoint."""
    run, exported = folder / "run", folder / "exported"

    importing = ("checkpoint", "import", str(library), "--model_dir", str(run))
    exporting = ("checkpoint", "export", "--model_dir", str(run), "--out", str(exported))
    return (
        Row(
            "checkpoint import",
            COPY,
            run / "checkpoint_0",
            lambda: run_command(*importing),
            library,
            run,
            pattern="weights_*",
            words=importing,
        ),
        Row(
            "checkpoint export",
            COPY,
            exported,
            lambda: run_command(*exporting),
            run,
            exported,
            words=exporting,
        ),
    )


def make_smaller(config: LlamaConfig, folder: Path) -> Path:
    """Write a model with one layer in Hugging Face's format. Return its folder."""
    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(smaller).save_pretrained(folder)
    return folder


class Measured(NamedTuple):
    """One run of a row.

    Attributes:
        taken: the row; of a command, only what the larger model takes longer.
        plain_s: seconds of the plain file.
        start_busy_s: processor time of the start of a command; `None` for other rows.
    """

    taken: Timed
    plain_s: float
    start_busy_s: float | None


def measure(row: Row, disk: Disk) -> Measured:
    """Run a row and its plain file once, and print the times."""
    start = None
    if row.smaller is None:
        taken = row.timed()
    else:
        alone, smaller = row.smaller.timed_alone(), row.smaller.timed()  # the second one without imports
        taken = row.timed().minus(smaller)
        start = alone.busy_s - taken.busy_s / taken.num_bytes * alone.num_bytes
    plain = {WRITE: disk.write, READ: disk.read, COPY: disk.copy}[row.use](taken.num_bytes)
    print(
        f"{row.name:34s} {taken.wall_s:7.2f} s  plain {row.use:5s} {plain:6.2f} s"
        f"  {plain / taken.wall_s:5.2f}  busy {1e9 * taken.busy_s / taken.num_bytes:5.2f} s/GB"
        + ("" if start is None else f"  start {start:.2f} s"),
        flush=True,
    )
    return Measured(taken, plain, start)


def table_row(name: str, runs: list[Measured]) -> dict[str, object]:
    """Return the medians of the runs of a row."""

    def median(of: Callable[[Measured], float]) -> float:
        return statistics.median(map(of, runs))

    row: dict[str, object] = {
        "row": name,
        "GB": round(runs[-1].taken.num_bytes / 1e9, 2),
        "MB/s": round(median(lambda run: run.taken.num_bytes / run.taken.wall_s) / 1e6),
        "plain MB/s": round(median(lambda run: run.taken.num_bytes / run.plain_s) / 1e6),
        "ratio": round(median(lambda run: run.plain_s / run.taken.wall_s), 2),
        "busy s/GB": round(median(lambda run: 1e9 * run.taken.busy_s / run.taken.num_bytes), 2),
    }
    starts = [run.start_busy_s for run in runs if run.start_busy_s is not None]
    return row | {"start busy s": round(statistics.median(starts), 2) if starts else ""}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--bytes", type=float, default=1e9, help="bytes of weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    folder = args.folder / "headwater-checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config, disk = make_config(int(args.bytes)), Disk(folder)
    rows = [row for tier in ("memory", "disk") for row in rows_of_tier(tier, config, folder)]
    smaller = make_smaller(config, folder / "smaller" / "library")
    rows += rows_of_commands((folder / "memory" / "library", smaller), folder)
    rounds: dict[str, list[Measured]] = {}
    try:
        for _ in range(args.rounds):
            for row in rows:
                if args.only in row.name:
                    rounds.setdefault(row.name, []).append(measure(row, disk))
    finally:
        shutil.rmtree(folder)
    table = [table_row(name, runs) for name, runs in rounds.items()]
    print_table(table)
    part = is_part(parser, args, "only")
    print(save("checkpoints", table, part=part))


if __name__ == "__main__":
    main()
