"""The rates of this machine: measured once while it is quiet, stored, and checked in later runs."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from headwater.core.arithmetic import Kernels
from headwater.core.kernels import context_of
from headwater.plan.machine import existing_ancestor
from headwater.plan.machine_cache import cache_file, machine_key, read_entries, write_entries
from headwater.plan.measuring import measure_apart
from headwater.plan.probes import QUIET_CPU_SHARE, Measurement, Timing, time_quick
from headwater.plan.rates import Calibration
from headwater.store.native_check import adam_in_use

_QUIET_LIFE_S, _BUSY_LIFE_S, _UNCHECKED_S = 30 * 86_400.0, 3_600.0, 600.0
"""Seconds for which a measurement is used: of a quiet machine; of a busy machine; without a quick check.
Other programs distort a measurement only while they run, so one of a busy machine is soon repeated."""
_FILE = "calibration.json"
_TOLERANCE = 1.5
"""Quick checks that differ by less than this factor count as equal."""

_IN_THIS_PROCESS: dict[str, Calibration | None] = {}
"""Rates by machine key: a process measures at most once, even if the measurement fails."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Known:
    """A measurement of an earlier run.

    Attributes:
        measurement: the rates, and the conditions of the measurement.
        taken_s: time of the measurement, in seconds since the epoch.
    """

    measurement: Measurement
    taken_s: float

    @property
    def quiet(self) -> bool:
        """True if this process got nearly all the time of its cores during the measurement."""
        return self.measurement.cpu_share >= QUIET_CPU_SHARE

    def needs_no_check(self, now_s: float) -> bool:
        """True if the measurement is so recent that it needs no quick check."""
        # A time in the future shows that the clock was changed, so the age is unknown.
        return 0 <= now_s - self.taken_s < _UNCHECKED_S

    def is_young(self, now_s: float) -> bool:
        """True if the measurement is recent enough to be used after a quick check."""
        return 0 <= now_s - self.taken_s < (_QUIET_LIFE_S if self.quiet else _BUSY_LIFE_S)

    def holds(self, quick: Timing) -> bool:
        """True if the stored measurement agrees with a quick check made now.

        On a machine that is busy now, a slow check does not refute the measurement. If the measurement
        was taken on a busy machine and the machine is quiet now, it should be measured again.
        """
        if quick.quiet and not self.quiet:
            return False
        ratio = quick.best_s["quick"] / self.measurement.quick_s
        return ratio > 1 / _TOLERANCE and (ratio < _TOLERANCE or not quick.quiet)

    def with_rates_of(self, others: Iterable[Known]) -> Calibration:
        """Return the rates, with all but those of the disk from the least disturbed measurement.

        Args:
            others: measurements of the same machine with other folders. They count if the machine was quiet
                and as fast as now.
        """
        now_s, quick_s = time.time(), self.measurement.quick_s
        alike = [
            other
            for other in others
            if other.quiet
            and other.is_young(now_s)
            and 1 / _TOLERANCE < other.measurement.quick_s / quick_s < _TOLERANCE
        ]
        # `max` returns the first of equals, so this measurement is first in the list.
        best = max([self, *alike], key=lambda known: known.measurement.cpu_share).measurement.rates
        own = self.measurement.rates
        return dataclasses.replace(
            best,
            disk_read_bytes_per_s=own.disk_read_bytes_per_s,
            disk_write_bytes_per_s=own.disk_write_bytes_per_s,
        )


def calibrate(
    device: str = "cpu",
    disk: Path | None = None,
    *,
    kernels: Kernels = "exact",
    recalibrate: bool = False,
    budget: int | None = None,
    most_wall_s: float | None = None,
) -> Calibration | None:
    """Return the rates of this machine, measured in a few seconds or stored by an earlier run.

    A stored measurement is used for a month if the machine was quiet when it was taken, otherwise for an
    hour. After ten minutes it is used only if a check of a tenth of a second agrees. A process measures once.
    Rates that do not depend on the folder are those of the least disturbed measurement with any folder.

    Args:
        device: `cpu` or `cuda`.
        disk: folder of the disk tier, which is measured too; it need not exist yet.
        kernels: the kernels of the run.
        recalibrate: measure even if the rates of this machine are stored, and forget the rates that were
            measured with other folders.
        budget: bytes of host memory that this process and the measuring one may hold; `None`: the free
            memory.
        most_wall_s: seconds after which a measurement is stopped; `None`: the limit for this device.

    Returns:
        The rates; `None` if the machine could not be measured in time and no rates are stored.

    Raises:
        ConfigError: if `disk` cannot be written to.
    """
    folder = None if disk is None else existing_ancestor(disk)
    # The key names the kernel of Adam, because another kernel updates parameters at another rate.
    suffix = f"|{adam_in_use()}|{kernels}"
    key = machine_key(device, folder) + suffix
    cache = cache_file(_FILE)
    if recalibrate or key not in _IN_THIS_PROCESS:

        def measure() -> Measurement | None:
            return measure_apart(device, folder, budget, kernels=kernels, most_wall_s=most_wall_s)

        # The quick check computes with the kernels of the measurement.
        with context_of(kernels, device)():
            known = _known(key, device, measure, recalibrate, cache)
        others = _with_other_folders(cache, key, machine_key(device), suffix)
        if recalibrate:  # the user doubts all earlier measurements
            _forget(cache, others)
            others = {}
        _IN_THIS_PROCESS[key] = None if known is None else known.with_rates_of(others.values())
    return _IN_THIS_PROCESS[key]


def _with_other_folders(cache: Path | None, key: str, machine: str, suffix: str) -> dict[str, Known]:
    """Return the stored measurements whose keys differ from `key` in the folder only."""
    return {
        other: known
        for other, known in _read_cache(cache).items()
        if other != key and other.startswith(machine) and other.endswith(suffix)
    }


def _known(
    key: str,
    device: str,
    measure: Callable[[], Measurement | None],
    recalibrate: bool,
    cache: Path | None,
) -> Known | None:
    """Return the stored measurement if it holds, otherwise a new one; `None` without either."""
    known = _read_cache(cache).get(key)
    if known is not None and not recalibrate and _still_holds(known, device):
        return known
    measurement = measure()
    if measurement is None:
        # Old rates of this machine are better than nominal ones.
        return known
    fresh = Known(measurement, time.time())
    if not fresh.quiet:
        if known is not None and known.quiet and not recalibrate:  # the older rates are not distorted
            return known
        logger.warning(
            "this process got %.0f %% of its cores while the rates of the machine were measured: predicted "
            "times may be too long; run `headwater plan --recalibrate` when the machine is quiet",
            100 * fresh.measurement.cpu_share,
        )
    _store(cache, key, fresh)
    return fresh


def _still_holds(known: Known, device: str) -> bool:
    now_s = time.time()
    return known.needs_no_check(now_s) or (known.is_young(now_s) and known.holds(time_quick(device)))


def _read_cache(cache: Path | None) -> dict[str, Known]:
    """Return stored measurements, without damaged entries and entries of versions with other fields."""
    entries = read_entries(cache).items()
    return {key: known for key, entry in entries if (known := _parse(entry)) is not None}


def _parse(entry: object) -> Known | None:
    match entry:
        case {
            "rates": dict(rates),
            "quick_s": float(quick_s),
            "cpu_share": float(cpu_share),
            "taken_s": float(taken_s),
        }:
            if _are_rates(rates) and _is_positive(quick_s):
                return Known(Measurement(Calibration(**rates), quick_s, cpu_share), taken_s)
    return None


def _are_rates(rates: dict[str, object]) -> bool:
    """True if these are all fields of a `Calibration`, with values that a measurement can have."""
    fields = {field.name: field for field in dataclasses.fields(Calibration)}
    return rates.keys() == fields.keys() and all(
        _is_positive(rate) or (rate is None and fields[name].default is None) for name, rate in rates.items()
    )


def _is_positive(number: object) -> bool:
    """True for a positive finite number."""
    return isinstance(number, float) and math.isfinite(number) and number > 0


def _store(cache: Path | None, key: str, fresh: Known) -> None:
    """Add a measurement to the cache. If the cache cannot be written, log a warning."""
    # The file is read again: another process may have stored its rates while this one measured.
    _write(cache, _read_cache(cache) | {key: fresh})


def _forget(cache: Path | None, keys: Collection[str]) -> None:
    """Remove measurements from the cache."""
    if keys:
        _write(cache, {key: known for key, known in _read_cache(cache).items() if key not in keys})


def _write(cache: Path | None, entries: Mapping[str, Known]) -> None:
    document = {
        key: dataclasses.asdict(known.measurement) | {"taken_s": known.taken_s}
        for key, known in entries.items()
    }
    write_entries(cache, document, what="the rates of this machine")
