"""The rows of one part of the measurements: a JSON file that is complete after each row."""

from __future__ import annotations

import json
import platform
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.runner import Row, print_table


class Rows:
    """The rows of a part, in a file. Rows that the file has already are not measured again.

    Args:
        path: the JSON file.
        seconds: time for all rows together. A row begins only if enough of it is left.
        device: `cpu` or `cuda`, for the description of the machine.
        kept: folder of a second copy, from which a later command continues if the file is gone.
        match: a regular expression. Rows whose names it does not match from their beginning are not measured.
    """

    def __init__(
        self, path: Path, seconds: float, device: str, kept: Path | None = None, match: str = ""
    ) -> None:
        self._paths = [path] if kept is None else [path, kept / path.name]
        self._match = re.compile(match)
        self._end_s = time.monotonic() + seconds
        self.machine = _machine(device)
        earlier = next((each for each in self._paths if each.exists()), None)
        self.rows: list[Row] = [] if earlier is None else json.loads(earlier.read_text())["rows"]

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end_s - time.monotonic()

    def has(self, name: str) -> bool:
        """True if a row of this name was measured, or has failed in another way than for lack of time."""
        return any(row["row"] == name and "not_run" not in row for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row, print it, and write the file. It replaces a row of the same name."""
        self.rows = [other for other in self.rows if other["row"] != row["row"]] + [row]
        print_table([row])
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n"
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            # In one operation: a process that is ended leaves the file as it was before or after.
            written = path.with_suffix(".tmp")
            written.write_text(text)
            written.replace(path)

    def measure(self, name: str, run: Callable[[], Row], least_s: float = 0.0) -> None:
        """Add the row that `run` returns; if it fails, a row with the reason.

        Args:
            name: of the row.
            run: measures it.
            least_s: seconds without which it does not begin.
        """
        if self.has(name) or not self._match.match(name):
            return
        if self.left_s < least_s:
            self.add({"row": name, "not_run": f"{self.left_s:.0f} s were left, it needs {least_s:.0f}"})
            return
        begin_s = time.monotonic()
        try:
            row = run()
        except Exception as error:  # noqa: BLE001  # the other rows must be measured
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}".strip()}
        self.add({"row": name, **row, "took_s": round(time.monotonic() - begin_s, 1)})


def card() -> str:
    """Return the name of the GPU in the form of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def _machine(device: str) -> dict[str, object]:
    found: dict[str, object] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found
