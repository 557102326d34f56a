"""Files in a folder that other users share: symbolic links of other users are not followed."""

import errno
import multiprocessing
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from headwater.core.buffers import aligned_empty
from headwater.core.checked_files import CheckedFile
from headwater.core.errors import CheckpointError, StoreError
from headwater.core.scratch import open_unnamed, private_folder, scratch_folder
from headwater.store.files import BlockFile

MALLORY = 23457
FORK = multiprocessing.get_context("fork")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")


def as_mallory(act, *arguments):
    """Run a function as another user."""

    def run():
        os.setgroups([])
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        act(*arguments)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def shared():
    """Return a folder in which every user may write; other users cannot reach `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder


@pytest.fixture(params=["without a name", "with a name for a moment"])
def file_system(request, monkeypatch):
    """Run with a file system that supports files without names, and with one that does not."""
    if request.param == "without a name":
        return
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


@needs_root
@pytest.mark.usefixtures("file_system")
def test_links_of_another_user_overwrite_nothing(shared, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)

    own = os.getpid()

    def plant():
        for name in ("stage_0000.bin", f"stage_0000.bin.{own}"):
            (shared / name).symlink_to(victim)

    as_mallory(plant)
    file = BlockFile(shared / "stage_0000.bin", 4096)
    file.write(0, aligned_empty(4096).fill_(1))
    back = aligned_empty(4096)
    file.read(0, back)
    file.close()
    assert back.eq(1).all() and victim.read_text() == "precious"
    assert {path.name.partition(".")[0] for path in shared.iterdir()} == {"stage_0000"}


@needs_root
@pytest.mark.usefixtures("file_system")
def test_no_other_user_sees_or_opens_a_scratch_file(shared):
    seen = FORK.SimpleQueue()
    stop = FORK.Event()

    def watch():
        os.setgroups([])
        os.setgid(MALLORY)
        os.setuid(MALLORY)
        opened = 0
        while not stop.is_set():
            for path in shared.iterdir():
                try:
                    os.close(os.open(path, os.O_RDONLY))
                    opened += 1
                except OSError:
                    pass
        seen.put(opened)

    watching = FORK.Process(target=watch, daemon=True)
    watching.start()
    for _ in range(200):
        file = open_unnamed(shared)
        found = os.fstat(file)
        assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (0, 0o600)
        os.close(file)
    stop.set()
    watching.join()
    assert watching.exitcode == 0 and seen.get() == 0
    assert not list(shared.iterdir())


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_unnamed(tmp_path / "nowhere")


def test_a_private_folder_is_made_once_and_closed_to_others(tmp_path):
    path = tmp_path / "a" / "b"
    assert private_folder(path) == path and stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    assert stat.S_IMODE(private_folder(path).stat().st_mode) == 0o700
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StoreError, match=r"expected a folder of this user .* got something else"):
        private_folder(link)


@needs_root
def test_a_private_folder_of_another_user_is_refused(shared):
    as_mallory((shared / "compiled").mkdir)
    with pytest.raises(StoreError, match=f"got a folder of uid {MALLORY}"):
        private_folder(shared / "compiled")


def test_several_threads_make_a_private_folder_at_once(tmp_path):
    failures = []

    def make():
        try:
            private_folder(tmp_path / "a" / "b")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_file_that_lasts_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        CheckedFile(tmp_path / "file", 10)
    assert victim.read_text() == "precious"


def test_a_checkpoint_of_a_script_is_not_written_through_a_link(tmp_path):
    import headwater as hw

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "model.mdl.partial").symlink_to(victim)
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        hw.save({"weight": torch.ones(3)}, tmp_path / "model.mdl")
    assert victim.read_text() == "precious"


@needs_root
def test_an_unfinished_checkpoint_of_another_user_is_refused(shared):
    import headwater as hw

    def plant():
        (shared / "model.mdl.partial").write_text("")
        (shared / "model.mdl.partial").chmod(0o666)

    as_mallory(plant)
    with pytest.raises((CheckpointError, StoreError)):
        hw.save({"weight": torch.ones(3)}, shared / "model.mdl")
    assert (shared / "model.mdl.partial").read_text() == ""


def test_a_scratch_folder_replaces_those_of_processes_that_have_ended(tmp_path):
    (tmp_path / ".work-left").mkdir()
    (tmp_path / ".work-left" / "file").write_text("of a killed process")
    with scratch_folder(tmp_path, ".work-") as first:
        assert list(tmp_path.iterdir()) == [first]
        (first / "file").write_text("in use")
        with scratch_folder(tmp_path, ".work-") as second:
            assert {*tmp_path.iterdir()} == {first, second}, "a folder in use stays"
        assert list(tmp_path.iterdir()) == [first]
        assert (first / "file").read_text() == "in use"
    assert not list(tmp_path.iterdir())
