"""Manifests of checkpoints that are missing or damaged."""

import pytest

from headwater.core.errors import CheckpointError, CorruptError
from headwater.store.snapshot_manifest import MANIFEST_FILE, read_manifest


def test_a_checkpoint_without_a_manifest_is_not_complete(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 5000, '{"format_version": 1}', "\x00"])
def test_a_manifest_with_other_contents_is_damaged(tmp_path, text):
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(CorruptError, match="the manifest is damaged"):
        read_manifest(tmp_path)


def test_a_folder_with_the_name_of_a_manifest_is_damage(tmp_path):
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(CorruptError, match="it is not a file"):
        read_manifest(tmp_path)
