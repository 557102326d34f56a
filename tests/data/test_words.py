"""Tokens from the table of words equal those of the tokenizer."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from headwater.data.tokenizer import TrainBPE, load_tokenizer
from headwater.data.words import TextEncoder


@pytest.fixture(scope="module")
def tokenizer(book):
    return TrainBPE(400).train([book])


ODD = st.lists(
    st.sampled_from([*"ab's 1²é\u0301”—\n\t\r\x0b\x1c\x85\xa0\u2003_-!", "'ll", "'t", "  ", "<|endoftext|>"])
).map("".join)


@given(st.one_of(st.text(), ODD))
def test_tokens_of_any_text_equal_the_tokenizer(tokenizer, text):
    (found,) = TextEncoder(tokenizer)([text])
    assert found.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_special_tokens_in_a_text_stay_whole(tokenizer):
    text = "one<|endoftext|>two"
    (found,) = TextEncoder(tokenizer)([text])
    assert found.tolist() == tokenizer.encode(text).ids
    assert tokenizer.token_to_id("<|endoftext|>") in found


def test_tokens_of_a_book_equal_gpt2(shared):
    tokenizer = load_tokenizer(shared / "vocab/gpt2")
    text = gzip.decompress((shared / "text/books/moby_dick.txt.gz").read_bytes()).decode()
    (found,) = TextEncoder(tokenizer)([text])
    assert found.tolist() == tokenizer.encode(text).ids


@pytest.mark.parametrize("kind", ["normalizer", "neox"])
def test_tokens_of_other_tokenizers_equal_the_tokenizer(tokenizer, shared, kind):
    other = Tokenizer.from_str(tokenizer.to_str())
    if kind == "neox":
        other = load_tokenizer(shared / "vocab/neox/20B_tokenizer.json")
    else:
        other.normalizer = normalizers.Lowercase()
    text = "Some  TEXT,\n with   gaps"
    (found,) = TextEncoder(other)([text])
    assert found.tolist() == other.encode(text).ids
