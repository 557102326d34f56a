"""The time in which the board shows a folder of long runs in Chromium: `python -m benchmarks.board`.

The benchmark writes 50 histories of 100,000 steps each, with the fields of a real run. It starts the command
`headwater board` and measures, from the start of the navigation until all charts of all runs are drawn:

- `first_s`: a page that is opened as soon as the command has printed its address. The charts show 400 steps
  of each run.
- `reading_s`: a page that is opened while the command still reads the histories.
- `complete_s`: a page that is opened when the command has read everything. The charts show all steps.

`read_s` is the time after which everything was read. Each page is a new browser session without a cache. The
histories take 3.9 GB in the folder for temporary files, and are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil

from benchmarks.options import end_on_sigterm, positive
from benchmarks.runner import is_part, print_table, save
from headwater.trainer.callback import StepEnd

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DIFFERENT = 5
"""Number of different histories; the others are copies."""
KINDS = ("compute", "wait", "input", "fetch", "gradient", "update", "disk read", "disk write")
BOUNDS = ("compute", "memory", "disk", "link", "input")
DRAWN = "() => performance.getEntriesByName('charts-shown').length > 0"
SHOWN_MS = "() => performance.getEntriesByName('charts-shown')[0].startTime"


def write_history(path: Path, steps: int, seed: int) -> None:
    """Write a history with as many bytes in a line as a run with the disk tier writes."""
    draw = random.Random(seed)
    busy, bound = ({name: draw.random() for name in names} for names in (KINDS, BOUNDS))
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 6 * math.exp(-step / 9000) + draw.gauss(0, 0.05) + 50 * (step == steps // 2)
            event = StepEnd(
                step, loss, 1e-3 * min(1, step / 2000), 1 + draw.random(), True, 1.0, 16384,
                0.5 + draw.random() / 100, 123456789, 12345678, draw.random(), draw.random(), 2 << 30, 8,
            )  # fmt: skip
            record = {"kind": "train", **dataclasses.asdict(event), "busy_s": busy, "bound_s": bound}
            file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def board(folder: Path) -> Any:
    """Run `headwater board` for a folder; yield its address and its process.

    Raises:
        RuntimeError: if the command ends without an address.
    """
    command = [sys.executable, "-m", "headwater", "board", str(folder), "--port", "0", "--no_jobs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output: IO[str] | None = process.stdout
        assert output is not None, "the output is a pipe"
        try:
            line = output.readline()
            if not line:
                raise RuntimeError(
                    f"headwater board ended with exit code {process.wait()}; see its error above"
                )
            yield line.split()[-1], psutil.Process(process.pid)
        finally:
            process.terminate()


def opened_s(browser: Browser, address: str) -> float:
    """Return the seconds from the start of the navigation until all charts are drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(address, wait_until="commit")
    page.wait_for_function(DRAWN, timeout=120_000)
    seconds = 1e-3 * float(page.evaluate(SHOWN_MS))
    context.close()
    return seconds


def read_share(address: str) -> float:
    """Return the share of its history that the board has read, for the run with the smallest share."""
    base, token = address.split("#token=")
    request = urllib.request.Request(f"{base}api/state", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return min(float(run["read_share"]) for run in json.load(answer)["runs"])


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Measure and return the seconds, as lists of `repeats` numbers, and the memory of the board."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {"first_s": [], "reading_s": [], "complete_s": [], "read_s": [], "memory_mb": []}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for number in range(repeats):
            with board(folder) as (address, _process):
                for name in ("first_s", "reading_s"):
                    found[name].append(opened_s(browser, address))
                    print(f"{number + 1}/{repeats}  {name} {found[name][-1]:.2f}", flush=True)
        with board(folder) as (address, process):
            begin = time.monotonic()
            while read_share(address) < 1:
                time.sleep(0.5)
            found["read_s"].append(time.monotonic() - begin)
            print(f"read_s {found['read_s'][-1]:.1f}", flush=True)
            found["complete_s"] += [opened_s(browser, address) for _ in range(repeats)]
            found["memory_mb"].append(process.memory_info().rss / 1e6)
        browser.close()
    return found


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=positive, default=50)
    parser.add_argument("--steps", type=positive, default=100_000)
    parser.add_argument("--repeats", type=positive, default=3)
    return parser


def missing() -> str | None:
    """Return what this benchmark needs and the machine lacks, or `None`."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    if shutil.which("chromium") is None:
        return "the program chromium is not installed: apt-get install chromium"
    return None


def main() -> None:
    """Measure, print the medians and write the result."""
    parser = make_parser()
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as place:
        folder = Path(place)
        print(f"writing {args.runs} histories of {args.steps} steps", flush=True)
        for index in range(args.runs):
            path = folder / "sweep" / f"run_{index:02d}" / "history.jsonl"
            if index < DIFFERENT:
                write_history(path, args.steps, index)
            else:
                path.parent.mkdir()
                shutil.copyfile(folder / "sweep" / f"run_{index % DIFFERENT:02d}" / path.name, path)
        size = sum(path.stat().st_size for path in folder.glob("*/*/history.jsonl"))
        found = measure(folder, args.repeats)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    print_table([medians])
    shape = {"runs": args.runs, "steps": args.steps, "bytes": size}
    part = is_part(parser, args, "runs", "steps")
    print(save("board", {**shape, "medians": medians, "values": found}, part=part))


if __name__ == "__main__":
    main()
