"""The calibration measures something, once."""

import dataclasses
import json

import pytest

from headwater.core.errors import ConfigError
from headwater.plan import calibrate as module
from headwater.plan.calibrate import Calibration, calibrate, free_resources
from headwater.plan.types import Resources


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    return calibrate(disk=folder, cache=folder / "cache.json"), folder


def test_every_rate_of_a_cpu_is_measured(measured):
    rates = dataclasses.asdict(measured[0])
    assert rates.pop("link_bytes_per_s") is None
    assert all(1e6 < rate < 1e16 for rate in rates.values()), rates


def test_nothing_is_left_in_the_folder(measured):
    assert [path.name for path in measured[1].iterdir()] == ["cache.json"]


def test_a_known_machine_is_not_measured_again(measured, monkeypatch):
    known, folder = measured
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("measured again"))
    assert calibrate(disk=folder / "not" / "yet", cache=folder / "cache.json") == known


@pytest.mark.parametrize("damage", ["", "{", '{"machine": {"fp32_flops_per_s": 1.0}}'])
def test_a_damaged_or_old_cache_is_measured_anew(tmp_path, monkeypatch, damage):
    fresh = Calibration(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    monkeypatch.setattr(module, "_measure", lambda *_: fresh)
    cache = tmp_path / "cache.json"
    cache.write_text(damage)
    assert calibrate(cache=cache) == fresh
    assert list(json.loads(cache.read_text()).values()) == [dataclasses.asdict(fresh)]


def test_recalibrate_measures_again(tmp_path, monkeypatch):
    rates = iter(
        [
            Calibration(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
            Calibration(9.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        ]
    )
    monkeypatch.setattr(module, "_measure", lambda *_: next(rates))
    cache = tmp_path / "cache.json"
    assert calibrate(cache=cache) != calibrate(cache=cache, recalibrate=True)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(ConfigError, match="file"):
        calibrate(disk=file, cache=tmp_path / "cache.json")


def test_budgets_that_are_set_stay(tmp_path):
    asked = Resources(host_memory=1, disk=tmp_path, disk_bytes=2)
    assert free_resources(asked, "cpu") == asked
    assert free_resources(Resources(), "cpu").host_memory > 0
