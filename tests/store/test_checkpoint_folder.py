"""Folders of checkpoints appear complete, and one of two is left wherever the process is killed."""

from headwater.core.files import PARTIAL_SUFFIX
from headwater.store.checkpoint_folder import REPLACED_SUFFIX, publish, recover, remove, retire


def make(folder, text):
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


def test_a_published_folder_replaces_an_older_one(tmp_path):
    folder = make(tmp_path / "checkpoint_1", "old")
    publish(make(tmp_path / f"checkpoint_1{PARTIAL_SUFFIX}", "new"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    assert (folder / "file").read_text() == "new"


def test_an_older_checkpoint_comes_back_after_a_kill_before_the_new_one_had_its_name(tmp_path):
    make(tmp_path / f"checkpoint_1{REPLACED_SUFFIX}", "old")
    make(tmp_path / f"checkpoint_1{PARTIAL_SUFFIX}", "new")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    assert (tmp_path / "checkpoint_1" / "file").read_text() == "old"


def test_a_replaced_checkpoint_is_removed_after_a_kill_when_the_new_one_has_its_name(tmp_path):
    make(tmp_path / f"checkpoint_1{REPLACED_SUFFIX}", "old")
    make(tmp_path / "checkpoint_1", "new")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]
    assert (tmp_path / "checkpoint_1" / "file").read_text() == "new"


def test_a_retired_checkpoint_leaves_nothing(tmp_path):
    retire(make(tmp_path / "checkpoint_1", "old"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_removed_and_not_its_target(tmp_path):
    target = make(tmp_path / "target", "kept")
    link = tmp_path / "link"
    link.symlink_to(target)
    remove(link)
    remove(tmp_path / "missing")
    assert not link.exists() and (target / "file").read_text() == "kept"
