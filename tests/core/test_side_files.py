"""Files beside weights: which belong there, copies of them, and what is read from them."""

import json

import pytest

from headwater.core.errors import ConfigError
from headwater.core.side_files import (
    copy_side_files,
    end_tokens,
    keep_generation_tokens,
    side_files,
    special_token,
)


def test_known_files_are_copied_but_for_those_that_are_named(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "model.safetensors"):
        (source / name).write_text(name)
    assert {path.name for path in side_files(source)} == {"tokenizer.json", "vocab.txt"}
    copy_side_files(source, target, but=["vocab.txt"])
    assert [path.name for path in target.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("found", "ids"), [({}, []), ({"eos_token_id": 2}, [2]), ({"eos_token_id": [2, 3]}, [2, 3])]
)
def test_end_tokens_are_one_or_several_or_none(tmp_path, found, ids):
    assert end_tokens(tmp_path) == []
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    assert end_tokens(tmp_path) == ids


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": true}', "[]", "{"])
def test_a_damaged_generation_config_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError):
        end_tokens(tmp_path)


def test_a_special_token_is_a_text_or_a_record_with_one(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None})
    )
    found = [special_token(tmp_path, f"{name}_token") for name in ("eos", "bos", "pad", "unk")]
    assert found == ["</s>", "<s>", None, None]


def test_tokens_of_a_config_are_kept_unless_there_is_a_generation_config(tmp_path):
    keep_generation_tokens({"eos_token_id": 5, "hidden_size": 8}, tmp_path)
    keep_generation_tokens({"eos_token_id": 6}, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 5}
