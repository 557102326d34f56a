"""Making an index: passages are encoded and written, file by file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from headwater.core.errors import ConfigError, CorruptError, DataError
from headwater.core.files import disk_errors, replace_file
from headwater.data.passages import PASSAGE_WORDS, Passage, first_tokens, halves, read_passages
from headwater.data.raw_records import BadRecords
from headwater.data.staging import file_marks, staged_folder
from headwater.retrieval.encoder import TextTokens, VectorEncoder
from headwater.retrieval.files import (
    MANIFEST_FILE,
    EncoderIdentity,
    FileEntry,
    Manifest,
    is_index,
    read_manifest,
    write_passages,
    write_tokenizer,
)

PASSAGES_PER_FILE = 8192
"""Passages that are encoded before they are written. A killed command continues after the last file."""

_MOST_WORDS = 100_000
"""Most words of a passage before it is halved; encoders read far fewer."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """The documents of an index.

    Attributes:
        files: files of text or records; see `find_inputs`.
        passage_words: most words of a passage.
        json_key: key of the text in records.
        skip_bad_records: leave out records that cannot be used; otherwise the first is an error.

    Raises:
        ConfigError: if `passage_words` is not positive, or larger than any encoder could use.
    """

    files: Sequence[Path]
    passage_words: int = PASSAGE_WORDS
    json_key: str = "text"
    skip_bad_records: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.passage_words <= _MOST_WORDS:
            raise ConfigError(
                f"expected from 1 to {_MOST_WORDS} words of a passage, got {self.passage_words}",
                where="--passage_words",
                remedy=f"use a number in this range, for example {PASSAGE_WORDS}",
            )


@dataclasses.dataclass(frozen=True)
class Built:
    """An index that was made.

    Attributes:
        manifest: its manifest.
        bad_records: number of records that were left out.
    """

    manifest: Manifest
    bad_records: int


def build_index(
    out: Path,
    texts: Texts,
    encoder: VectorEncoder,
    identity: EncoderIdentity,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Built:
    """Write an index of texts to the new folder `out`, which appears when it is complete.

    Until then the files are in `out` + `.partial`. After a kill or an error the same call continues there.

    Args:
        out: the folder.
        texts: the documents.
        encoder: encoder of passages.
        identity: the trained model of the encoder.
        overwrite: replace the index that `out` already holds.
        on_progress: called with the number of passages that are encoded.

    Raises:
        DataError: if an input cannot be read, the inputs have no text, `out` is in use, or `out` holds
            something else than an index.
        StoreError: if the index cannot be written.
    """
    bad = BadRecords(texts.skip_bad_records)
    passages = read_passages(texts.files, num_words=texts.passage_words, json_key=texts.json_key, bad=bad)
    # `skip_bad_records` is not in the key: the passages before the first bad record do not depend on it.
    options = [texts.passage_words, texts.json_key]
    reads = [encoder.texts.tokenizer.to_str(), encoder.texts.end, encoder.texts.length]
    key = json.dumps([dataclasses.asdict(identity), options, reads, file_marks(texts.files)])
    replace = replaces(out, overwrite)
    with disk_errors(out), staged_folder(out, replace=replace, key=key, keep=MANIFEST_FILE) as folder:
        checksum = write_tokenizer(folder, encoder.texts.tokenizer)
        manifest = Manifest(identity, encoder.dimension, checksum, encoder.texts.end, [])
        # If the manifest is missing or unreadable, all passages are encoded again.
        with contextlib.suppress(CorruptError, DataError):
            manifest = read_manifest(folder)
        for entry in _written(folder, manifest, divided(passages, encoder.texts), encoder, on_progress):
            manifest = dataclasses.replace(manifest, files=[*manifest.files, entry])
            replace_file(folder / MANIFEST_FILE, manifest.to_json())
        if not manifest.num_passages:
            raise DataError(
                "the inputs have no text",
                where=", ".join(map(str, texts.files[:3])),
                remedy="name files that are not empty",
            )
    return Built(manifest, bad.count)


def replaces(out: Path, overwrite: bool) -> bool:
    """Return true if an index at `out` is replaced. A folder with other content is never replaced.

    Raises:
        DataError: if an index is to be replaced, and `out` is not an index and not empty.
    """
    if not overwrite or is_index(out):
        return overwrite
    with disk_errors(out):
        has_content = out.is_dir() and any(out.iterdir())
    if has_content:
        raise DataError(
            f"expected an index to replace, found a folder that is not empty and has no {MANIFEST_FILE} of "
            "an index",
            where=str(out),
            remedy="choose another folder, or remove this one yourself",
        )
    return False


def _written(
    folder: Path,
    manifest: Manifest,
    passages: Iterator[tuple[Passage, list[int]]],
    encoder: VectorEncoder,
    on_progress: Callable[[int], None],
) -> Iterator[FileEntry]:
    """Encode and write the passages that come after those in `manifest`; yield each file's entry."""
    done, number = manifest.num_passages, len(manifest.files)
    passages = itertools.islice(passages, done, None)
    while block := list(itertools.islice(passages, PASSAGES_PER_FILE)):
        vectors = encoder.encode(
            [tokens for _, tokens in block], functools.partial(_report_progress, on_progress, done)
        )
        path = folder / f"passages_{number:05}.safetensors"
        yield write_passages(path, [passage for passage, _ in block], vectors)
        done, number = done + len(block), number + 1


def _report_progress(on_progress: Callable[[int], None], before: int, count: int) -> None:
    on_progress(before + count)


def divided(passages: Iterable[Passage], texts: TextTokens) -> Iterator[tuple[Passage, list[int]]]:
    """Yield passages in order with their tokens. A passage that the encoder cannot read whole is halved.

    Args:
        passages: the passages.
        texts: tokenizer of the encoder.
    """
    source = iter(passages)
    while some := list(itertools.islice(source, 256)):
        tokens = texts.of_passages(some)
        for passage, each in zip(some, tokens, strict=True):
            if len(each) > texts.length and len(passage.text) > 1:
                yield from divided(halves(passage), texts)
            else:
                yield passage, first_tokens(each, texts.length)
