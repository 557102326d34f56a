"""Errors of files in words, without the numbers of the system and the names of Python's codecs."""

import errno
import json
import os
from pathlib import Path

import pytest

import headwater as hw
from headwater.core.errors import ConfigError, RunError, StoreError
from headwater.core.files import disk_errors, lookup_errors, replace_file, why_unreadable


def read_text(path):
    return path.read_text(encoding="utf-8")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "read", "why"),
    [
        (None, read_text, "No such file or directory"),
        (b"a\xff", read_text, "byte 1 is not UTF-8"),
        (b"", read_json, "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"{}", lambda path: read_json(path)["step"], "KeyError('step')"),
    ],
)
def test_why_a_file_cannot_be_read(tmp_path, content, read, why):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((OSError, ValueError, KeyError)) as raised:
        read(path)
    assert why_unreadable(raised.value) == why


def test_a_folder_that_cannot_be_created_because_a_file_is_there(tmp_path):
    path = tmp_path / "scratch"
    path.touch()
    with pytest.raises(StoreError) as raised, disk_errors(path):
        path.mkdir(exist_ok=True)
    assert raised.value.what == "scratch cannot be created, because a file is there"
    assert raised.value.where == str(path) and "move it away" in raised.value.remedy


def test_a_path_that_the_user_may_not_look_up():
    path = Path("a" * 300)
    with pytest.raises(ConfigError) as raised, lookup_errors():
        path.is_file()
    assert raised.value.what == "a path cannot be used: File name too long"
    assert raised.value.where == "a" * 100 and raised.value.remedy == "name a shorter path"
    with pytest.raises(ConfigError) as raised, lookup_errors():
        raise PermissionError(errno.EACCES, "Permission denied", "runs/other")
    assert raised.value.what == "a path cannot be used: Permission denied"
    assert raised.value.where == "runs/other" and "give this user the right" in raised.value.remedy


def test_other_errors_of_the_system_stay_as_they_are():
    with pytest.raises(FileNotFoundError), lookup_errors():
        Path("missing").stat()
    with pytest.raises(PermissionError), lookup_errors():  # no file is named, for example for a port
        raise PermissionError(errno.EACCES, "Permission denied")


def test_devices_and_links_to_devices_and_pipes_are_never_replaced_by_a_file(tmp_path):
    pipe, to_pipe, to_device = (tmp_path / name for name in ("pipe", "to_pipe", "to_device"))
    os.mkfifo(pipe)
    to_pipe.symlink_to(pipe)
    to_device.symlink_to(os.devnull)
    for path in (to_pipe, to_device):
        for write in (lambda path: replace_file(path, b"content"), lambda path: hw.save({"step": 1}, path)):
            with pytest.raises(RunError, match="found a device"):
                write(path)
    assert to_pipe.readlink() == pipe and to_device.readlink() == Path(os.devnull)
    assert sorted(tmp_path.iterdir()) == [pipe, to_device, to_pipe]
