"""Tokenizers: trained, or read from files of other libraries, with errors that name damaged files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from headwater.core.errors import ConfigError, DataError
from headwater.data import documents
from headwater.data.documents import cut_pieces, read_pieces
from headwater.data.tokenizer import TrainBPE, end_of_text_id, load_tokenizer


@pytest.fixture(scope="module")
def trained(book):
    return TrainBPE(512).train(text for text, _ in cut_pieces([book]))


@pytest.fixture
def gpt2_oracle(shared):
    transformers = pytest.importorskip("transformers")
    vocab = json.loads((shared / "vocab/gpt2/encoder.json").read_text(encoding="utf-8"))
    lines = (shared / "vocab/gpt2/vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split()) for line in lines if line]
    return transformers.GPT2Tokenizer(vocab=vocab, merges=merges)


def encode_pieces(tokenizer, pieces):
    return [token for text, *_ in pieces for token in tokenizer.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("file", ["c4_sample.jsonl.gz", "tinyshakespeare.txt.gz"])
def test_gpt2_files_tokenize_as_transformers_does(shared, gpt2_oracle, file):
    tokenizer = load_tokenizer(shared / "vocab" / "gpt2")
    assert (end_of_text_id(tokenizer), tokenizer.get_vocab_size()) == (50256, 50257)
    document = ""
    for piece in read_pieces([shared / "text" / file]):
        document += piece.text
        if piece.ends_document:
            assert encode_pieces(tokenizer, cut_pieces([document])) == gpt2_oracle(document)["input_ids"]
            document = ""


def test_tokenizer_json_is_read_unchanged(shared):
    path = shared / "vocab" / "neox" / "20B_tokenizer.json"
    tokenizer, oracle = load_tokenizer(path), Tokenizer.from_file(str(path))
    text = "Weights   stream\n\n in, <|endoftext|> gradients\tstream out: 你好"
    assert tokenizer.encode(text).ids == oracle.encode(text).ids
    assert end_of_text_id(tokenizer) == 0


def test_trained_tokenizer_has_the_requested_size_and_is_lossless(trained, book):
    assert trained.get_vocab_size() == 512
    assert end_of_text_id(trained) == 0
    strange = "naïve\u2028 🐎\x00\r\n"
    assert trained.decode(trained.encode(strange).ids) == strange
    assert len(trained.encode(book).ids) < len(book.encode()) / 2


def test_training_repeats_to_the_byte(trained, book):
    assert TrainBPE(512).train([book[:120_000]]).to_str() == TrainBPE(512).train([book[:120_000]]).to_str()
    assert TrainBPE(512).train(text for text, _ in cut_pieces([book])).to_str() == trained.to_str()


words = st.text(alphabet="abc,.'\n\té1", min_size=1, max_size=5)


@settings(max_examples=50)
@given(st.lists(words, min_size=1, max_size=60), st.sampled_from([" ", " a ", "  \n", "\n\n a b "]))
def test_tokens_are_independent_of_the_cuts(trained, texts, separator):
    text = f"{separator} a b ".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_CHARS", 32)
        pieces = list(cut_pieces([text]))
    assert encode_pieces(trained, pieces) == trained.encode(text).ids


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"257 \(256 bytes.*got 256"):
        TrainBPE(256)


def test_error_names_missing_tokenizer_files(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"the folder has vocab\.json, but no vocab\.bpe or merges\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(DataError, match=r"the folder has no tokenizer(.|\n)*tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="tokenizer does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "not a tokenizer.json"),
        (b'{"model": {"type": "No"}, "added_tokens": []}', "tokenizer is damaged"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_error_names_a_damaged_tokenizer_json(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("merges", "message", "place"),
    [
        ("#version: 0.2\na b c\n", "expected two tokens in a merge, got 3", ", line 2"),
        ("#version: 0.2\na z\n", "tokenizer is damaged", ""),
    ],
)
def test_error_names_the_damaged_merges_line(tmp_path, merges, message, place):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.where == f"{tmp_path / 'merges.txt'}{place}"


def test_tokenizer_without_end_of_text_needs_the_option(trained):
    plain = Tokenizer(models.BPE(vocab={"a": 0, "</stop>": 1}, merges=[]))
    plain.add_special_tokens(["</stop>"])
    with pytest.raises(DataError, match=r"(?s)no end-of-text token.*--end_of_text.*</stop>"):
        end_of_text_id(plain)
    assert end_of_text_id(plain, "</stop>") == 1
    with pytest.raises(DataError, match=r"(?s)no end-of-text token.*<\|endoftext\|>"):
        end_of_text_id(trained, "<|endoftxt|>")
