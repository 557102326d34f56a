"""A run stops with a checkpoint before memory is full, and warns when it exceeds its budget."""

import logging
import time

from headwater.core.units import GIB, MIB
from headwater.trainer import memory_watch as module
from headwater.trainer.interrupt import Interrupt
from headwater.trainer.memory_watch import FreeMemory, memory_watch


def watched(monkeypatch, room, *, budget=None, held=0):
    """Return True if a run with this much free memory is asked to stop."""
    looks = []

    def look():
        looks.append(room)
        return room

    monkeypatch.setattr(module, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(module, "least_free_memory", look)
    monkeypatch.setattr(module, "held_bytes", lambda: held)
    monkeypatch.setattr(module, "return_free_memory", lambda: None)
    interrupt = Interrupt()
    with memory_watch(interrupt, budget):
        while not interrupt.requested and len(looks) < 20:
            time.sleep(0.002)
    return interrupt.requested


def test_a_run_is_stopped_where_memory_is_short(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert watched(monkeypatch, FreeMemory(free=8 * MIB, limit=400 * MIB))
    assert "stopping after this step with a checkpoint: 8.00 MiB of 400 MiB" in caplog.text


def test_a_run_with_enough_memory_finishes(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert not watched(monkeypatch, FreeMemory(free=GIB, limit=8 * GIB), budget=GIB, held=GIB)
    assert not caplog.text


def test_a_run_over_its_budget_warns_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert not watched(monkeypatch, FreeMemory(free=GIB, limit=8 * GIB), budget=GIB, held=2 * GIB)
    assert caplog.text.count("its budget is 1.00 GiB") == 1


def test_the_threshold_of_short_memory_depends_on_the_limit():
    assert FreeMemory(free=15 * MIB, limit=100 * MIB).is_short
    assert not FreeMemory(free=17 * MIB, limit=100 * MIB).is_short
    assert FreeMemory(free=200 * MIB, limit=64 * GIB).is_short
    assert not FreeMemory(free=300 * MIB, limit=64 * GIB).is_short
