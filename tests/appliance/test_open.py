"""Selection of the queue that a command uses."""

import pytest

from headwater.appliance.folder import find_folder
from headwater.appliance.machine import find_slots
from headwater.appliance.open import open_queue
from headwater.core.errors import ConfigError, QueueError


def test_an_unknown_queue_backend_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="unknown queue 'cloud'"):
        open_queue("cloud")
    monkeypatch.setenv("HEADWATER_QUEUE", "cluod")
    with pytest.raises(ConfigError, match="write one of embedded, slurm"):
        open_queue()


def test_slurm_without_sbatch_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QueueError, match="the command sbatch was not found"):
        open_queue("slurm")


def test_the_folder_of_the_queue(monkeypatch, tmp_path):
    monkeypatch.delenv("HEADWATER_QUEUE_DIR", raising=False)
    monkeypatch.setattr("headwater.appliance.folder.MACHINE", tmp_path / "machine")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert find_folder().path == tmp_path / "state/headwater/queue"
    assert find_folder(shared=True).path == tmp_path / "machine"
    (tmp_path / "machine").mkdir()
    assert find_folder().path == tmp_path / "machine"
    monkeypatch.setenv("HEADWATER_QUEUE_DIR", str(tmp_path / "named"))
    assert find_folder().path == tmp_path / "named"
    assert find_folder(tmp_path / "given").path == tmp_path / "given"


def test_cores_are_divided_among_csxs(monkeypatch):
    monkeypatch.setattr("headwater.appliance.machine._gpus", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
    assert [slot.cores for slot in find_slots()] == [(4,), (5,), (6,), (7,), (9,)]
    assert [slot.cores for slot in find_slots(2)] == [(4, 5), (6, 7, 9)]
    assert [slot.cores for slot in find_slots(6)][-1] == (4,)


def test_each_gpu_is_a_csx(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr("headwater.appliance.machine._DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [(slot.gpu, slot.cores) for slot in find_slots()] == [("3", (0, 1, 2, 3)), ("5", (4, 5, 6, 7))]
    for hidden, gpus in (("-1", [None] * 8), ("1,-1,0", ["1"]), ("", [None] * 8)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert [slot.gpu for slot in find_slots()] == gpus
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot.gpu for slot in find_slots()] == ["0", "1"]
    with pytest.raises(ConfigError, match="1 to 2 \\(GPUs of this machine\\), got 3"):
        find_slots(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [slot.gpu for slot in find_slots(3)] == [None] * 3
