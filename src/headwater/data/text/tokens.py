"""What data for encoder-decoders have in common: the vocabulary, tokens of many texts, batches of pairs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from headwater.config.data.pairs import TokenPairSection
from headwater.core.errors import DataError
from headwater.data.loader import Batch
from headwater.data.text.lines import read_lines
from headwater.data.tokenizer import load_tokenizer

Tokens = npt.NDArray[np.int32]

_TEXTS_AT_ONCE = 4096
_SENTINEL = re.compile(r"<extra_id_\d+>")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """From text to numbers.

    Attributes:
        size: one more than the highest number, without tokens that stand for spans of text.
        start: the token that begins what is written.
        end: the one that ends it.
        padding: the one that fills texts up.
        encode: numbers of some texts.
    """

    size: int
    start: int
    end: int
    padding: int
    encode: Callable[[Sequence[str]], list[list[int]]]


def open_vocabulary(path: Path, config: TokenPairSection, model_size: int) -> Vocabulary:
    """The vocabulary in a file: tokens, one a line, of texts that are cut at spaces, or a `tokenizer.json`.

    Args:
        path: the file.
        config: names the tokens that mean something.
        model_size: tokens that the model has, those that stand for spans included.

    Raises:
        DataError: if the file is missing or damaged, lacks a token, or has more than the model.
    """
    numbers, encode = _tokenizer(path) if path.suffix == ".json" else _token_file(path, config.oov_token)
    for key in ("sos_token", "eos_token", "pad_token"):
        if getattr(config, key) not in numbers:
            raise _no_token(path, key, getattr(config, key))
    size = 1 + max(number for token, number in numbers.items() if not _SENTINEL.fullmatch(token))
    if size + config.extra_ids > model_size:
        raise DataError(
            f"there are {size} tokens and {config.extra_ids} extra_ids, and the model has {model_size}",
            where=str(path),
            remedy=f"set src_vocab_size to {size} and extra_ids to {config.extra_ids} in the model",
        )
    return Vocabulary(
        size,
        start=numbers[config.sos_token],
        end=numbers[config.eos_token],
        padding=numbers[config.pad_token],
        encode=encode,
    )


_Encode = Callable[[Sequence[str]], list[list[int]]]


def _tokenizer(path: Path) -> tuple[dict[str, int], _Encode]:
    """Numbers of the tokens of a `tokenizer.json`, and what applies it."""
    tokenizer: Tokenizer = load_tokenizer(path)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return tokenizer.get_vocab(), encode


def _token_file(path: Path, unknown_token: str) -> tuple[dict[str, int], _Encode]:
    """Numbers of the tokens in a file with one a line, and what looks up those of texts cut at spaces."""
    numbers = {token.strip(): number - 1 for number, token in read_lines(path) if token.strip()}
    if unknown_token not in numbers:
        raise _no_token(path, "oov_token", unknown_token)
    unknown = numbers[unknown_token]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[numbers.get(token, unknown) for token in text.split()] for text in texts]

    return numbers, encode


def _no_token(path: Path, key: str, token: str) -> DataError:
    return DataError(
        f"{key} is {token!r}, which is no token of the vocabulary",
        where=str(path),
        remedy=f"name the token with {key}",
    )


class TokenLists:
    """The tokens of many texts in one array.

    Args:
        texts: tokens of each.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        parts = [np.asarray(text, dtype=np.int32) for text in texts]
        self._tokens: Tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self.ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Tokens:
        start = self.ends[index - 1] if index else 0
        return self._tokens[start : self.ends[index]]


def encoded(texts: Iterable[str], vocabulary: Vocabulary, *, lower: bool) -> Iterator[list[int]]:
    """Numbers of each text."""
    lines = (text.lower() if lower else text for text in texts)
    while part := list(itertools.islice(lines, _TEXTS_AT_ONCE)):
        yield from vocabulary.encode(part)


@dataclasses.dataclass(frozen=True)
class PairFiller:
    """Makes batches of texts to read and texts to write.

    Attributes:
        source_length: tokens of a text to read, filled up.
        target_length: likewise to write, with the token that begins or ends it.
        start: token that begins what the decoder reads.
        end: token that ends the labels.
        input_padding: fills up what is read.
        label_padding: fills up the labels.
        weighted: give each sample the weight 1 / labels.
    """

    source_length: int
    target_length: int
    start: int
    end: int
    input_padding: int
    label_padding: int
    weighted: bool

    @classmethod
    def of(cls, config: TokenPairSection, vocabulary: Vocabulary) -> PairFiller:
        """As a section of a params file says."""
        padding = vocabulary.padding
        return cls(
            config.src_max_sequence_length,
            config.tgt_max_sequence_length,
            vocabulary.start,
            vocabulary.end,
            padding if config.input_pad_id is None else config.input_pad_id,
            padding if config.labels_pad_id is None else config.labels_pad_id,
            config.dynamic_loss_weight,
        )

    def fill(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> Batch:
        """A batch.

        Returns:
            `input_ids` and `attention_mask` [batch, source_length]; `decoder_input_ids`, `labels` and
            `decoder_attention_mask` [batch, target_length]; `loss_weight` [batch, 1] if weighted.
        """
        rows, ones = len(pairs), np.ones(self.target_length, dtype=np.int64)
        source = np.full((rows, self.source_length), self.input_padding, dtype=np.int64)
        target = np.full((rows, self.target_length), self.input_padding, dtype=np.int64)
        labels = np.full((rows, self.target_length), self.label_padding, dtype=np.int64)
        text, written = np.zeros_like(source), np.zeros_like(target)
        for row, (read, write) in enumerate(pairs):
            source[row, : len(read)], text[row, : len(read)] = read, 1
            target[row, 0], target[row, 1 : len(write) + 1] = self.start, write
            labels[row, : len(write)], labels[row, len(write)] = write, self.end
            written[row, : len(write) + 1] = ones[: len(write) + 1]
        arrays = {
            "input_ids": source,
            "attention_mask": text,
            "decoder_input_ids": target,
            "decoder_attention_mask": written,
            "labels": labels,
        }
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.weighted:
            batch["loss_weight"] = 1 / batch["decoder_attention_mask"].sum(1, keepdim=True)
        return batch


def listed_files(folder: Path) -> list[tuple[Path, ...]]:
    """The files that `meta.dat` in a folder lists, those of a line together; none without such a list.

    A line names one file or two that belong together, and last their number of lines. Files are in the
    folder, or where the names lead.

    Raises:
        DataError: if the folder or a file does not exist, or a line is not of this form.
    """
    if not folder.exists():
        raise DataError("the folder does not exist", where=f"src_data_dir: {folder}", remedy="name another")
    meta, found = folder / "meta.dat", []
    if not meta.is_file():
        return []
    for number, line in read_lines(meta):
        if not line.strip():
            continue
        *names, count = line.split()
        paths = tuple(folder / name if (folder / name).exists() else Path(name) for name in names)
        missing = next((path for path in paths if not path.is_file()), None)
        if not paths or not count.isdigit() or missing is not None:
            raise DataError(
                f"{missing} does not exist"
                if missing
                else "the line is not file names and a number of lines",
                where=f"{meta}, line {number}",
                remedy="correct the line, or remove the file",
            )
        found.append(paths)
    return found


def text_files(place: Path) -> list[Path]:
    """The file itself, or the files in a folder in the order of their names.

    Raises:
        DataError: if there are none.
    """
    files = [place] if place.is_file() else []
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise DataError(
            "there are no text files", where=str(place), remedy="name a text file, or a folder of them"
        )
    return files
