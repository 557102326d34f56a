"""Chat template in the folder of a tokenizer."""

import json

import pytest

from headwater.core.errors import DataError
from headwater.data.modes.chat import find_template


def test_template_of_a_folder_or_of_the_folder_of_a_file(tmp_path):
    assert find_template(None) is None
    assert find_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert find_template(tmp_path / "tokenizer.json") == "one"
    named = [{"name": "tools", "template": "two"}, {"name": "default", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert find_template(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert find_template(tmp_path) == "four"


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": [{"name": "default"}]}'])
def test_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"(?s)chat template cannot be read.*tokenizer_config.json"):
        find_template(tmp_path)
