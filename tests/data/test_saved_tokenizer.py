"""Tokenizer of prepared data: its tokens, and the files beside the samples."""

import pytest
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.data.modes import ModeOptions, find_mode
from headwater.data.saved_tokenizer import save_tokenizer
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE, load_tokenizer


def save(folder, mode, tokenizer=None, texts=("some text", "more text"), **options):
    settings = PrepareSettings(
        tokenizer or TrainBPE(257), 8, mode=mode, options=ModeOptions(**options)
    ).with_chat_template()
    return save_tokenizer(folder, settings, find_mode(mode, settings.options), iter(texts))


def test_a_saved_tokenizer_is_loaded_instead_of_trained(tmp_path):
    trained = save(tmp_path, "pretraining")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json"]
    assert save(tmp_path, "pretraining", texts=()).to_str() == trained.to_str()


def test_tokens_of_the_mode_are_added_once(tmp_path):
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    added = save(tmp_path, "fill_in_the_middle")
    assert all(added.token_to_id(name) is not None for name in names)
    (tmp_path / "other").mkdir()
    (tmp_path / "out").mkdir()
    plain = TrainBPE(300).train(["some text"])
    plain.add_special_tokens(["<fim_prefix>"])
    plain.save(str(tmp_path / "other/tokenizer.json"))
    kept = save(tmp_path / "out", "fill_in_the_middle", tmp_path / "other")
    assert kept.get_vocab_size() == plain.get_vocab_size(), "it has such a token, spelled without bars"


def test_a_missing_token_names_the_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"(?s)mode masked needs the tokens \[PAD\].*--vocab_size"):
        save(tmp_path, "masked")
    assert list(tmp_path.iterdir()) == []


def test_chat_template_and_side_files_are_kept(tmp_path):
    (tmp_path / "source").mkdir()
    save(tmp_path / "source", "pretraining")
    (tmp_path / "source/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "source/special_tokens_map.json").write_text("{}")
    for name in ("chat", "plain"):
        (tmp_path / name).mkdir()
    save(tmp_path / "chat", "chat", tmp_path / "source")
    assert (tmp_path / "chat/chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "chat/special_tokens_map.json").is_file()
    save(tmp_path / "plain", "chat")
    assert "### " in (tmp_path / "plain/chat_template.jinja").read_text()
    assert Tokenizer.from_file(str(tmp_path / "plain/tokenizer.json"))


def test_texts_are_not_cut_or_padded_to_a_length_in_the_file(tmp_path):
    tokenizer = TrainBPE(300).train(["some text"])
    expected = [tokenizer.encode(text).ids for text in ("some text " * 20, "some")]
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert [loaded.encode(text).ids for text in ("some text " * 20, "some")] == expected
