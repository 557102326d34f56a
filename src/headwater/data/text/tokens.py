"""Common parts of data for encoder-decoders: vocabulary, tokens of many texts, batches of pairs."""

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
    """A vocabulary: its size, its special tokens, and the function that encodes texts.

    Attributes:
        size: largest token id plus one; sentinels (`<extra_id_N>`) do not count.
        start: id of the first token of the decoder's input.
        end: id of the last token of a text.
        padding: id of the padding token.
        encode: turns texts into lists of token ids.
    """

    size: int
    start: int
    end: int
    padding: int
    encode: Callable[[Sequence[str]], list[list[int]]]


def open_vocabulary(path: Path, config: TokenPairSection, model_size: int) -> Vocabulary:
    """Load a vocabulary.

    Args:
        path: a `tokenizer.json`, or a text file with one token per line for texts that are split at spaces.
        config: section of the params file with the names of the special tokens.
        model_size: vocabulary of the model, sentinels included.

    Raises:
        DataError: if the file is missing or damaged, lacks a special token, or has more tokens than the
            model.
    """
    numbers, encode = _tokenizer(path) if path.suffix == ".json" else _token_file(path, config.oov_token)
    for key in ("sos_token", "eos_token", "pad_token"):
        if getattr(config, key) not in numbers:
            raise _no_token(path, key, getattr(config, key))
    size = 1 + max(number for token, number in numbers.items() if not _SENTINEL.fullmatch(token))
    if size + config.extra_ids > model_size:
        raise DataError(
            f"{size} tokens and {config.extra_ids} extra_ids do not fit into the model's {model_size} tokens",
            where=str(path),
            remedy=f"set src_vocab_size to {size} and extra_ids to {config.extra_ids} in the model's section",
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
    """Return the ids of the tokens of a `tokenizer.json`, and a function that encodes texts."""
    tokenizer: Tokenizer = load_tokenizer(path)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return tokenizer.get_vocab(), encode


def _token_file(path: Path, unknown_token: str) -> tuple[dict[str, int], _Encode]:
    """Return the ids of the tokens of a file with one token per line, and a function that encodes texts.

    The function splits texts at spaces.
    """
    numbers = {token.strip(): number - 1 for number, token in read_lines(path) if token.strip()}
    if unknown_token not in numbers:
        raise _no_token(path, "oov_token", unknown_token)
    unknown = numbers[unknown_token]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[numbers.get(token, unknown) for token in text.split()] for text in texts]

    return numbers, encode


def _no_token(path: Path, key: str, token: str) -> DataError:
    return DataError(
        f"{key} is {token!r}, which is not in the vocabulary",
        where=str(path),
        remedy=f"set {key} to a token of this file",
    )


class TokenLists:
    """The tokens of many texts, stored in one array.

    Args:
        texts: token ids of each text.
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
    """Yield the token ids of each text.

    Args:
        texts: texts, read as needed.
        vocabulary: vocabulary that encodes them.
        lower: convert to lower case first.
    """
    lines = (text.lower() if lower else text for text in texts)
    while part := list(itertools.islice(lines, _TEXTS_AT_ONCE)):
        yield from vocabulary.encode(part)


@dataclasses.dataclass(frozen=True)
class PairFiller:
    """A maker of batches of pairs: sources, which the encoder reads, and targets, which the decoder writes.

    Attributes:
        source_length: tokens of a source after padding.
        target_length: tokens of a target after padding, with its start or end token.
        start: id of the first token of the decoder's input.
        end: id of the last label.
        input_padding: id that pads the inputs of encoder and decoder.
        label_padding: id that pads the labels.
        weighted: add the weight 1 / (number of labels) for each sample.
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
        """Return the `PairFiller` for a section of a params file."""
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
        """Return a batch of pairs of source and target tokens.

        Returns:
            `input_ids` and `attention_mask`, int64 [batch, source_length]; `decoder_input_ids`, `labels` and
            `decoder_attention_mask`, int64 [batch, target_length]; `loss_weight`, fp32 [batch, 1], if
            weighted.
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
    """Return the files listed in `meta.dat` of a folder, one tuple per line; empty without `meta.dat`.

    A line has the name of one file, or of two parallel files, and then their number of lines. A name is
    relative to the folder, or else a path.

    Raises:
        DataError: if the folder or a file does not exist, or a line is malformed.
    """
    if not folder.exists():
        raise DataError(
            "the folder does not exist", where=f"src_data_dir: {folder}", remedy="set another src_data_dir"
        )
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
                else "line is malformed: expected file names and a number of lines",
                where=f"{meta}, line {number}",
                remedy="correct the line, or remove meta.dat",
            )
        found.append(paths)
    return found


def text_files(place: Path) -> list[Path]:
    """Return the file itself, or the files in a folder in the order of their names.

    Raises:
        DataError: if no file is found.
    """
    files = [place] if place.is_file() else []
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise DataError(
            "no text files found", where=str(place), remedy="name a text file, or a folder of text files"
        )
    return files
