"""Reading of documents: complete, in order, in little memory, with errors that name bad documents."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.data import documents
from headwater.data.documents import cut_pieces, find_inputs, read_pieces


def read_all(path, **options):
    """Return the documents of one file, each joined from its pieces."""
    found, text = [], ""
    for piece in read_pieces([path], **options):
        assert piece.text and piece.text_bytes == len(piece.text.encode())
        text += piece.text
        if piece.ends_document:
            found.append(text)
            text = ""
    assert text == "", "the last piece ends its document"
    return found


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl", ".jsonl.gz"])
def test_all_file_types_yield_their_documents(tmp_path, book, suffix):
    texts = [book] if suffix.startswith(".txt") else [book, "", "žluťoučký kůň\u2028🐎", "x"]
    content = book if suffix.startswith(".txt") else "\n\n".join(json.dumps({"text": text}) for text in texts)
    path = tmp_path / f"input{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith("gz") else content.encode())
    assert read_all(path) == [text for text in texts if text]


def test_progress_ends_at_the_size_of_the_inputs(tmp_path, book):
    paths = [tmp_path / "a.txt.gz", tmp_path / "b.txt"]
    paths[0].write_bytes(gzip.compress(book.encode()))
    paths[1].write_text(book)
    seen = [piece.file_bytes for piece in read_pieces(paths)]
    assert seen == sorted(seen)
    assert seen[-1] == sum(path.stat().st_size for path in paths)


@given(st.lists(st.text(max_size=60)), st.integers(4, 40))
def test_pieces_join_to_the_document(blocks, piece_chars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_CHARS", piece_chars)
        pieces = list(cut_pieces(blocks))
    assert "".join(text for text, _ in pieces) == "".join(blocks)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)
    assert all(0 < len(text) <= piece_chars for text, _ in pieces)


def test_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "mark.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read_all(path) == ["hello"]


@pytest.mark.parametrize("suffix", [".txt.gz", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    path = tmp_path / f"long{suffix}"
    line = "word " * 200 if suffix == ".txt.gz" else json.dumps({"text": "word " * 200})
    path.write_bytes(gzip.compress(f"{line}\n".encode() * 30_000, compresslevel=1))
    tracemalloc.start()
    total = sum(piece.text_bytes for piece in read_pieces([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total >= 30_000_000
    assert peak < 2_000_000


def test_a_folder_stands_for_its_text_files_in_order(tmp_path):
    for name in ("b/2.jsonl", "b/1.txt.gz", "a.txt", "c.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [path.relative_to(tmp_path).as_posix() for path in find_inputs([tmp_path])]
    assert names == ["a.txt", "b/1.txt.gz", "b/2.jsonl"]


def test_error_for_a_wrong_path_suggests_the_nearest(tmp_path):
    (tmp_path / "corpus.txt").touch()
    (tmp_path / "table.tsv").touch()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "corpsu.txt": r"(?s)does not exist.*corpsu.txt.*did you mean .*corpus.txt",
        "table.tsv": r"(?s)unknown file type.*table.tsv.*\.jsonl\.gz",
        "empty": r"(?s)no input files.*empty",
    }.items():
        with pytest.raises(DataError, match=message):
            find_inputs([tmp_path / name])
    with pytest.raises(DataError, match="no input files"):
        find_inputs([])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"line is not JSON: Expecting ',' delimiter at character 13"),
        (b"[" * 100_000, "line is not JSON"),
        (b'["a"]', "expected a JSON object in this line, got list"),
        (b'{"txet": "a"}', "(?s)no key 'text'.*--json_key.*'txet'"),
        (b'{"text": 3}', "expected a string at 'text', got int"),
        (b'{"text": "\xff"}', "line is not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_error_names_the_bad_jsonl_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        read_all(path)
    assert caught.value.where == f"{path}, line 3"


@pytest.mark.parametrize("position", [0, 3, documents.PIECE_CHARS - 1, documents.PIECE_CHARS, 100_001])
def test_error_names_the_byte_that_is_not_utf8(tmp_path, position):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a" * position + b"\xe9" + b"b" * 9)
    with pytest.raises(DataError, match="text is not UTF-8") as caught:
        read_all(path)
    assert caught.value.where == f"{path}, byte {position}"


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_error_names_the_damaged_gzip_file(tmp_path, book, damage):
    content = bytearray(gzip.compress(book.encode()))
    if damage == "cut":
        del content[-2000:]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    path = tmp_path / "book.txt.gz"
    path.write_bytes(book.encode() if damage == "plain" else content)
    with pytest.raises(DataError, match=r"gzip file is damaged or cut short|text is not UTF-8") as caught:
        read_all(path)
    assert str(path) in caught.value.where
