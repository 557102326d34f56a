"""The index on disk: exact search, damage, and an index whose making was interrupted."""

import json
import zlib

import numpy as np
import pytest
import torch

from headwater.config.models.encoder import TowerConfig
from headwater.core.errors import CorruptError, DataError, NonFiniteError
from headwater.data.passages import Passage
from headwater.data.tokenizer import TrainBPE
from headwater.models.encoder import Encoder
from headwater.retrieval import build
from headwater.retrieval.build import Texts, build_index, divided
from headwater.retrieval.encoder import TextTokens, VectorEncoder
from headwater.retrieval.files import (
    MANIFEST_FILE,
    EncoderIdentity,
    Manifest,
    read_manifest,
    read_tokenizer,
    write_passages,
)
from headwater.retrieval.index import PassageIndex

IDENTITY = EncoderIdentity("runs/dpr", "runs/dpr/checkpoint_1", "0")


def write_index(folder, vectors, sizes):
    """Write an index with some vectors, in files of the given sizes."""
    folder.mkdir(exist_ok=True)
    entries, start = [], 0
    for number, size in enumerate(sizes):
        passages = [Passage(f"text {n} é", f"title {n}", f"line {n}") for n in range(start, start + size)]
        path = folder / f"passages_{number:05}.safetensors"
        entries.append(write_passages(path, passages, vectors[start : start + size]))
        start += size
    manifest = Manifest(IDENTITY, vectors.shape[1], 0, 0, entries)
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())
    return PassageIndex(folder)


@pytest.mark.parametrize("sizes", [[37], [1, 20, 16], [5] * 7 + [2]])
@pytest.mark.parametrize("k", [1, 6, 37])
def test_search_equals_brute_force(sizes, k, tmp_path):
    vectors = torch.randn(37, 12, generator=torch.Generator().manual_seed(0))
    questions = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    found = write_index(tmp_path / "index", vectors, sizes).search(questions, k)
    products = questions.double().numpy() @ vectors.double().numpy().T
    expected = np.argsort(-products, axis=1)[:, :k]
    assert [[hit.number for hit in row] for row in found] == expected.tolist()
    scores = [[hit.score for hit in row] for row in found]
    np.testing.assert_allclose(scores, np.take_along_axis(products, expected, 1), rtol=1e-5, atol=1e-5)
    best = found[0][0]
    n = best.number
    assert best.passage == Passage(f"text {n} é", f"title {n}", f"line {n}")


def test_the_safetensors_library_reads_the_vectors(tmp_path):
    from safetensors.torch import load_file

    vectors = torch.randn(5, 4)
    write_index(tmp_path / "index", vectors, [5])
    tensors = load_file(tmp_path / "index" / "passages_00000.safetensors")
    assert torch.equal(tensors["vectors"], vectors)


def test_unsuitable_searches_are_refused(tmp_path):
    index = write_index(tmp_path / "index", torch.randn(3, 4), [2, 1])
    with pytest.raises(DataError, match=r"(?s)from 1 to 3 passages.*got 4.*ask for at most 3"):
        index.search(torch.randn(1, 4), 4)
    with pytest.raises(DataError, match="got 0"):
        index.search(torch.randn(1, 4), 0)
    with pytest.raises(DataError, match=r"shape \[questions, 4\], got \[1, 5\]"):
        index.search(torch.randn(1, 5), 1)


def test_folders_without_an_index_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such index"):
        PassageIndex(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no index\.json"):
        PassageIndex(tmp_path / "empty")


def damaged_manifest():
    """Return a manifest with a right checksum whose content is of another form."""
    content = {"encoder": 3}
    checksum = zlib.crc32(json.dumps(content, separators=(",", ":")).encode())
    document = {"kind": "headwater index", "format_version": 1, "checksum": checksum, "content": content}
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"kind": "headwater index"}', b"\xff", damaged_manifest()]
)
def test_a_damaged_manifest_is_refused(content, tmp_path):
    write_index(tmp_path / "index", torch.randn(3, 4), [3])
    (tmp_path / "index" / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(CorruptError, match=r"(?s)manifest is damaged.*headwater index") as raised:
        PassageIndex(tmp_path / "index")
    assert "pydantic" not in str(raised.value)


def test_a_changed_manifest_and_another_version_are_refused(tmp_path):
    write_index(tmp_path / "index", torch.randn(3, 4), [3])
    path = tmp_path / "index" / MANIFEST_FILE
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"content": document["content"] | {"dimension": 5}}))
    with pytest.raises(CorruptError, match="checksum differs"):
        PassageIndex(tmp_path / "index")
    path.write_text(json.dumps(document | {"format_version": 2}))
    with pytest.raises(DataError, match="format version 1, got version 2"):
        PassageIndex(tmp_path / "index")


def test_a_foreign_file_with_the_name_of_the_manifest_is_refused(tmp_path):
    write_index(tmp_path / "index", torch.randn(3, 4), [3])
    path = tmp_path / "index" / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kind": "a catalogue"}))
    with pytest.raises(DataError, match=r"another index\.json"):
        PassageIndex(tmp_path / "index")


def test_every_damaged_byte_is_found(tmp_path):
    write_index(tmp_path / "index", torch.randn(6, 4), [3, 3])
    path = tmp_path / "index" / "passages_00001.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptError, match=r"(?s)differ from what was written.*passages_00001"):
            PassageIndex(tmp_path / "index").search(torch.randn(1, 4), 1)
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptError, match=f"a file of {len(whole)} bytes, found {len(whole) - 1}"):
        PassageIndex(tmp_path / "index")
    path.unlink()
    with pytest.raises(CorruptError, match="found 0 bytes"):
        PassageIndex(tmp_path / "index")


# Making an index


@pytest.fixture(scope="module")
def encoder():
    """Return a small random encoder with a tokenizer that was trained on numbers."""
    tokenizer = TrainBPE(300).train([" ".join(map(str, range(100)))])
    config = TowerConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=2,
        filter_size=16,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    model = Encoder(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return VectorEncoder(model, TextTokens(tokenizer, 0, 24), "cpu", rows=4)


@pytest.fixture
def texts(tmp_path):
    """Return texts with 40 passages."""
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(200))))
    return Texts([path], passage_words=5)


def test_vectors_are_those_of_the_encoder_without_padding(encoder, texts, tmp_path):
    built = build_index(tmp_path / "index", texts, encoder, IDENTITY)
    index = PassageIndex(tmp_path / "index")
    assert len(index) == built.manifest.num_passages == 40 and built.bad_records == 0
    for number in (0, 7, 39):
        passage = index.passage(number)
        assert passage.text == " ".join(map(str, range(5 * number, 5 * number + 5)))
        alone = encoder.encode(encoder.texts.of([passage.text]))
        torch.testing.assert_close(index._files[0].vectors[number : number + 1], alone)
    assert read_tokenizer(index.folder, index.manifest.tokenizer).encode("7").ids


def test_an_interrupted_index_continues_after_its_last_file(encoder, texts, tmp_path, monkeypatch):
    build_index(tmp_path / "whole", texts, encoder, IDENTITY)
    monkeypatch.setattr(build, "PASSAGES_PER_FILE", 8)
    encoded = []

    def stop(count):
        encoded.append(count)
        if count > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index", texts, encoder, IDENTITY, on_progress=stop)
    assert not (tmp_path / "index").exists()
    assert read_manifest(tmp_path / "index.partial").num_passages == 16
    encoded.clear()
    build_index(tmp_path / "index", texts, encoder, IDENTITY, on_progress=encoded.append)
    assert min(encoded) == 20 and max(encoded) == 40 and not (tmp_path / "index.partial").exists()
    index, whole = PassageIndex(tmp_path / "index"), PassageIndex(tmp_path / "whole")
    assert [index.passage(n) for n in range(40)] == [whole.passage(n) for n in range(40)]
    vectors = torch.cat([file.vectors for file in index._files])
    torch.testing.assert_close(vectors, whole._files[0].vectors)


def test_an_index_continues_after_a_bad_record(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PASSAGES_PER_FILE", 8)
    path, counts = tmp_path / "texts.jsonl", []
    lines = [json.dumps({"text": str(number)}) for number in range(600)]
    # Records are read 256 at a time, so the error comes after some passages are written.
    path.write_text("\n".join([*lines, "no record"]))
    with pytest.raises(DataError, match="line 601"):
        build_index(tmp_path / "index", Texts([path]), encoder, IDENTITY, on_progress=counts.append)
    assert read_manifest(tmp_path / "index.partial").num_passages == max(counts) > 400
    counts.clear()
    texts = Texts([path], skip_bad_records=True)
    built = build_index(tmp_path / "index", texts, encoder, IDENTITY, on_progress=counts.append)
    assert min(counts) > 400 and built.manifest.num_passages == 600 and built.bad_records == 1
    index = PassageIndex(tmp_path / "index")
    assert [index.passage(number).text for number in range(600)] == [*map(str, range(600))]


def test_a_damaged_partial_index_begins_again(encoder, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PASSAGES_PER_FILE", 8)

    def stop(count):
        if count > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index", texts, encoder, IDENTITY, on_progress=stop)
    (tmp_path / "index.partial" / MANIFEST_FILE).write_bytes(b"{")
    build_index(tmp_path / "index", texts, encoder, IDENTITY)
    assert len(PassageIndex(tmp_path / "index")) == 40


def test_another_model_does_not_continue_an_interrupted_index(encoder, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PASSAGES_PER_FILE", 8)

    def stop(count):
        if count > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index", texts, encoder, IDENTITY, on_progress=stop)
    encoded = []
    other = EncoderIdentity("runs/dpr", "runs/dpr/checkpoint_2", "1")
    build_index(tmp_path / "index", texts, encoder, other, on_progress=encoded.append)
    assert min(encoded) == 4
    assert PassageIndex(tmp_path / "index").manifest.encoder == other


def test_only_an_index_is_replaced(encoder, texts, tmp_path):
    build_index(tmp_path / "index", texts, encoder, IDENTITY)
    with pytest.raises(DataError, match="not empty"):
        build_index(tmp_path / "index", texts, encoder, IDENTITY)
    other = Texts(texts.files, passage_words=4)
    build_index(tmp_path / "index", other, encoder, IDENTITY, overwrite=True)
    assert len(PassageIndex(tmp_path / "index")) == 50
    for content in ("", "[]", '{"version": 1}'):
        (tmp_path / "index" / MANIFEST_FILE).write_text(content)
        with pytest.raises(DataError, match="expected an index to replace"):
            build_index(tmp_path / "index", other, encoder, IDENTITY, overwrite=True)
    (tmp_path / "index" / MANIFEST_FILE).unlink()
    with pytest.raises(DataError, match="expected an index to replace"):
        build_index(tmp_path / "index", other, encoder, IDENTITY, overwrite=True)


def test_a_checkpoint_is_never_replaced(encoder, texts, tmp_path):
    checkpoint = tmp_path / "checkpoint_100"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "weights.safetensors").write_bytes(b"weights")
    with pytest.raises(DataError, match="expected an index to replace"):
        build_index(checkpoint, texts, encoder, IDENTITY, overwrite=True)
    assert (checkpoint / "weights.safetensors").read_bytes() == b"weights"


def test_texts_without_words_are_refused(encoder, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"(?s)no text.*empty\.txt"):
        build_index(tmp_path / "index", Texts([tmp_path / "empty.txt"]), encoder, IDENTITY)
    assert not (tmp_path / "index").exists() and not (tmp_path / "index.partial").exists()


def test_a_passage_that_the_encoder_cannot_read_is_halved(encoder):
    text = " ".join(map(str, range(100)))
    found = list(divided([Passage(text, "the title", "here")], encoder.texts))
    assert " ".join(passage.text for passage, _ in found) == text
    assert all(len(tokens) <= 24 for _, tokens in found) and len(found) > 4


@pytest.mark.parametrize(
    "title",
    ["title " * 20, "https://example.org/" + "a" * 150, "河" * 60],
    ids=["words", "address", "chinese"],
)
@pytest.mark.parametrize("gap", [" ", ""])
def test_a_long_title_leaves_room_for_the_text(title, gap, encoder):
    text = gap.join(map(str, range(100)))
    found = list(divided([Passage(text, title, "here")], encoder.texts))
    assert gap.join(passage.text for passage, _ in found) == text
    decode = encoder.texts.tokenizer.decode
    for passage, tokens in found:
        assert len(tokens) <= 24 and tokens[-1] == 0 and passage.title == title
        assert decode(tokens).endswith(f" {passage.text}"), "the whole text is encoded"
    vectors = encoder.encode([tokens for _, tokens in found])
    assert len(vectors.unique(dim=0)) == len(found) > 4


def test_a_tokenizer_of_another_model_and_infinite_vectors_are_refused(encoder):
    with pytest.raises(DataError, match=r"(?s)below 300.*got 300"):
        encoder.encode([[1, 300]])
    weight = encoder._model.embedding.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[7] = torch.nan
    with pytest.raises(NonFiniteError, match="found NaN"):
        encoder.encode([[1, 2], [7]])
    with torch.no_grad():
        weight.copy_(kept)


def test_a_damaged_tokenizer_is_found(encoder, texts, tmp_path):
    build_index(tmp_path / "index", texts, encoder, IDENTITY)
    path = tmp_path / "index" / "tokenizer.json"
    checksum = PassageIndex(tmp_path / "index").manifest.tokenizer
    assert zlib.crc32(path.read_bytes()) == checksum
    path.write_text(path.read_text() + " ")
    with pytest.raises(CorruptError, match="tokenizer is missing or damaged"):
        read_tokenizer(tmp_path / "index", checksum)
