"""Bytes of single tokens: byte-level BPE, byte tokens of SentencePiece, and tokenizers without bytes."""

import pytest
from serving_samples import TEXT
from tokenizers import Tokenizer, decoders, models

from headwater.data.codec import Codec
from headwater.data.tokenizer import TrainBPE
from headwater.serving.tokens import TokenTexts


def texts(tokenizer):
    return TokenTexts(Codec(tokenizer, None, (0,), 0))


@pytest.mark.parametrize("text", ["a", "é", "→", "🙂", " \u00ad\x00\x7f\xa0", "日本語"])
def test_bytes_of_byte_level_tokens_are_those_of_the_text(text):
    tokenizer = TrainBPE(400).train([TEXT])
    found = texts(tokenizer)
    ids = tokenizer.encode(text).ids
    assert b"".join(found[token].bytes for token in ids) == text.encode()
    assert len(ids) > len(text) or text == "a"


def test_every_byte_has_a_token():
    tokenizer = TrainBPE(400).train([TEXT])
    found = texts(tokenizer)
    single = {found[token].bytes for token in range(tokenizer.get_vocab_size())}
    assert single >= {bytes([byte]) for byte in range(256)}
    special = tokenizer.token_to_id("<|endoftext|>")
    assert found[special].bytes == found[special].text.encode()


def sentencepiece(*names):
    vocabulary = {name: number for number, name in enumerate(["<unk>", *names])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_byte_tokens_and_words_of_sentencepiece():
    found = texts(sentencepiece("<0xE2>", "<0x41>", "▁mill", "\ufffd"))
    assert [found[token].bytes for token in (1, 2, 3, 4)] == [b"\xe2", b"A", b" mill", "\ufffd".encode()]
    assert found[1].text == "\ufffd"


def test_a_tokenizer_without_bytes():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "日?": 1}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Replace("?", "\ufffd")
    assert texts(tokenizer)[1] == ("日\ufffd", None)
