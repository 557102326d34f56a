"""The tokenizer of a model: special tokens and conversations, compared with transformers."""

import pytest
from evaluation_samples import save_tokenizer

from headwater.core.errors import ConfigError
from headwater.data.codec import open_codec

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Who grinds the corn?"}, {"role": "assistant", "content": "The mill"}]


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("messages", "prompt"), [(MESSAGES[:1], True), (MESSAGES, False)])
def test_conversations_equal_those_of_transformers(folder, messages, prompt):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, continue_final_message=not prompt
    )
    codec = open_codec(folder)
    assert codec.conversation(messages, prompt=prompt) == theirs
    # The text begins with the special token already.
    assert codec.encode(theirs).count(codec.prefix) == codec.encode(theirs, special=False).count(codec.prefix)


def test_a_missing_template_is_named(folder):
    with pytest.raises(ConfigError, match="no chat template") as caught:
        open_codec(folder).conversation(MESSAGES, prompt=True)
    assert caught.value.where == str(folder)


def test_end_tokens(folder):
    codec = open_codec(folder)
    assert codec.ends == (codec.tokenizer.token_to_id("<|endoftext|>"),)
    assert codec.prefix == codec.ends[0]
    assert open_codec(folder, end=7).ends == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert open_codec(folder, known_ends=(9, 11)).ends == (0, 9, 11)
