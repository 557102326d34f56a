"""Saving and loading of checkpoints against plain files: `python -m benchmarks.checkpoints --folder DIR`.

A Llama of transformers is trained for one step on each tier. Then its checkpoints are saved and loaded in
every format, round after round. After each of them, a plain file of as many bytes is written (with fsync) or
read, in large blocks, one after the other. The ratio of a row is the time of the plain file divided by the
row's time. Every read begins with no page of its files in the page cache.

A command also runs on a smaller model in each round, and the differences in time and bytes count: the
start of the command takes the same time for both models. `busy s/GB` is the processor time of a row on
all threads, which depends less on other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import headwater as hw
from benchmarks.runner import print_table, save
from headwater.cli.main import main as headwater_main
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.store import WeightStore
from headwater.stream.at_rest import home_of

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


def bytes_in(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*"))


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
        use: what is done with the plain file: `write`, `read` or `copy`.
        files: the files whose bytes count.
        run: what is measured.
        sources: files that it reads; they leave the page cache first.
        target: a folder that it makes; it is removed first.
        smaller: the same with fewer bytes, which also runs; only the difference counts.
    """

    name: str
    use: str
    files: Path
    run: Callable[[], object]
    sources: Path | None = None
    target: Path | None = None
    smaller: Row | None = None

    def timed(self) -> Timed:
        """Run it once."""
        if self.target is not None:
            shutil.rmtree(self.target, ignore_errors=True)
        if self.sources is not None:
            leave_cache(self.sources)
        start, busy = time.perf_counter(), time.process_time()
        self.run()
        return Timed(time.perf_counter() - start, time.process_time() - busy, bytes_in(self.files))


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

    def command(*words: object) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert headwater_main(list(map(str, words))) == 0

    def import_folder() -> None:
        command("checkpoint", "import", library, "--model_dir", run)

    def export_run() -> None:
        command("checkpoint", "export", "--model_dir", run, "--out", exported)

    return (
        Row("checkpoint import", WRITE, run / "checkpoint_0", import_folder, library, run),
        Row("checkpoint export", COPY, exported, export_run, run, exported),
    )


def make_smaller(config: LlamaConfig, folder: Path) -> Path:
    """Write a model with one layer in Hugging Face's format. Return its folder."""
    smaller = copy.deepcopy(config)
    smaller.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(smaller).save_pretrained(folder)
    return folder


def measure(row: Row, disk: Disk, rounds: dict[str, list[tuple[Timed, float]]]) -> None:
    """Run a row and its plain file once, and note the times."""
    taken = row.timed()
    if row.smaller is not None:
        smaller = row.smaller.timed()
        print(f"{row.name:34s} {taken}, {smaller}")
        taken = taken.minus(smaller)
    plain = {WRITE: disk.write, READ: disk.read, COPY: disk.copy}[row.use](taken.num_bytes)
    rounds.setdefault(row.name, []).append((taken, plain))
    print(
        f"{row.name:34s} {taken.wall_s:7.2f} s  plain {row.use:5s} {plain:6.2f} s"
        f"  {plain / taken.wall_s:5.2f}  busy {1e9 * taken.busy_s / taken.num_bytes:5.2f} s/GB",
        flush=True,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--bytes", type=float, default=1e9, help="bytes of weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    folder = args.folder / "headwater-checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config, disk = make_config(int(args.bytes)), Disk(folder)
    rows = [row for tier in ("memory", "disk") for row in rows_of_tier(tier, config, folder)]
    smaller = make_smaller(config, folder / "smaller" / "library")
    rows += rows_of_commands((folder / "memory" / "library", smaller), folder)
    rounds: dict[str, list[tuple[Timed, float]]] = {}
    try:
        for _ in range(args.rounds):
            for row in rows:
                if args.only in row.name:
                    measure(row, disk, rounds)
    finally:
        shutil.rmtree(folder)
    table = [
        {
            "row": name,
            "GB": round(runs[-1][0].num_bytes / 1e9, 2),
            "MB/s": round(statistics.median(taken.num_bytes / taken.wall_s for taken, _ in runs) / 1e6),
            "plain MB/s": round(statistics.median(taken.num_bytes / plain for taken, plain in runs) / 1e6),
            "ratio": round(statistics.median(plain / taken.wall_s for taken, plain in runs), 2),
            "busy s/GB": round(
                statistics.median(1e9 * taken.busy_s / taken.num_bytes for taken, _ in runs), 2
            ),
        }
        for name, runs in rounds.items()
    ]
    print_table(table)
    print(save("checkpoints", table))


if __name__ == "__main__":
    main()
