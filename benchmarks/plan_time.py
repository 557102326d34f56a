"""CPU time of `headwater plan` on each params file of a folder: `python -m benchmarks.plan_time FOLDER`.

Each file is planned in a new process with one thread. A line shows the seconds of CPU (user mode, which other
work on the machine changes little), the seconds until the first line of progress on stderr, and the outcome.
A plan that does not fit this machine counts too. The deepest model of each family comes first. Options after
`--` go to `headwater plan`. The exit code is 1 if a file takes more than `--limit_s` or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_REFUSED = "does not fit"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run of `headwater plan`.

    Attributes:
        file: the params file, relative to the folder.
        cpu_s: seconds of CPU in user mode.
        first_notice_s: seconds from the start to the first line on stderr that tells of progress; `None` if
            no line was printed.
        outcome: `planned`, `refused` (no plan fits this machine) or the last line of the error.
    """

    file: str
    cpu_s: float
    first_notice_s: float | None
    outcome: str


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before `--`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="", help="a regular expression that paths must contain")
    parser.add_argument("--most", type=int, help="number of files of each family; all by default")
    parser.add_argument("--limit_s", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="the measurements as JSON")
    return parser


def main() -> int:
    own, passed_on = _split(sys.argv[1:])
    args = make_parser().parse_args(own)
    files = [path for path in sorted(args.folder.rglob("*.yaml")) if re.search(args.match, str(path))]
    measurements = []
    for path in _deepest_first(files, args.folder, args.most):
        measured = measure(path, str(path.relative_to(args.folder)), passed_on)
        measurements.append(measured)
        notice = "–" if measured.first_notice_s is None else f"{measured.first_notice_s:.1f}"
        print(f"{measured.cpu_s:6.1f} s  {notice:>5}  {measured.outcome:8.60}  {measured.file}", flush=True)
        if args.out:
            args.out.write_text(json.dumps([dataclasses.asdict(each) for each in measurements], indent=1))
    slow = [each for each in measurements if each.cpu_s > args.limit_s]
    failed = [each for each in measurements if each.outcome not in ("planned", "refused")]
    print(f"{len(measurements)} files, {len(slow)} over {args.limit_s:g} s, {len(failed)} failed")
    return 1 if slow or failed else 0


def measure(path: Path, name: str, options: list[str]) -> Measurement:
    """Plan one file in a new process and return what it took."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"}
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater", "plan", str(path), *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, started_s, lines))
    reader.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join()
    notices = [seconds for seconds, line in lines if " so far)" in line]
    return Measurement(
        file=name,
        cpu_s=round(usage.ru_utime, 2),
        first_notice_s=round(notices[0], 2) if notices else None,
        outcome=_outcome(process.returncode, [line for _, line in lines]),
    )


def _read(process: subprocess.Popen[str], started_s: float, lines: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.monotonic() - started_s, line.strip()))


def _outcome(code: int, lines: list[str]) -> str:
    if code == 0:
        return "planned"
    if any(_REFUSED in line for line in lines):
        return "refused"
    return next((line for line in reversed(lines) if "rror" in line), f"exit code {code}")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _deepest_first(files: list[Path], folder: Path, most: int | None) -> list[Path]:
    """Return the deepest model of each family, then the second deepest of each, and so on."""
    families: dict[tuple[str, ...], list[Path]] = {}
    for path in files:
        families.setdefault(path.relative_to(folder).parts[:2], []).append(path)
    ranked = [
        (place, path)
        for family in families.values()
        for place, path in enumerate(sorted(family, key=_depth, reverse=True)[:most])
    ]
    return [path for _, path in sorted(ranked)]


def _depth(path: Path) -> tuple[int, str]:
    """Return a sort key: the number of layers times that of experts, which decide the time of a dry run."""
    text = path.read_text()
    layers = sum(map(int, re.findall(r"num_(?:hidden_)?layers: *(\d+)", text)))
    experts = max(map(int, re.findall(r"num_experts: *(\d+)", text)), default=1)
    return layers * experts, path.name


if __name__ == "__main__":
    sys.exit(main())
