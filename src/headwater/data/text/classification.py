"""Texts with one class each (SST-2, MNLI), and texts with one class per token (named entities)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from headwater.config.data import TextClassificationDataConfig, TokenClassificationDataConfig
from headwater.core.batches import IGNORED
from headwater.core.errors import DataError
from headwater.core.files import why_unreadable
from headwater.core.units import counted
from headwater.data.loader import Batch
from headwater.data.text.lines import read_lines
from headwater.data.text.wordpiece import wordpiece

_MNLI_CLASSES = ("contradiction", "entailment", "neutral")


class LabelledTexts:
    """A data set of texts, or pairs of texts, with one class each.

    A batch has `input_ids`, `attention_mask` and `token_type_ids`, int64 [batch, length], and `labels`, int64
    [batch].

    Args:
        texts: one or two texts per sample.
        labels: class of each sample.
        tokenizer: tokenizer that truncates and pads to `length`.
        length: tokens per sample.
    """

    def __init__(
        self, texts: Sequence[tuple[str, ...]], labels: Sequence[int], tokenizer: Tokenizer, length: int
    ) -> None:
        self.texts = texts
        self.labels = np.asarray(labels, dtype=np.int64)
        self.sequence_length = length
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        indices = [draw % len(self) for draw in draws]
        texts = [self.texts[index] for index in indices]
        encoded = self._tokenizer.encode_batch([text if len(text) > 1 else text[0] for text in texts])
        return _tensors(encoded) | {"labels": torch.from_numpy(self.labels[indices])}


class LabelledTokens:
    """A data set of texts with one class per word.

    A batch has `input_ids`, `attention_mask`, `token_type_ids` and `labels`, int64 [batch, length]. The first
    token of a word has the class of the word. All other tokens have the label `IGNORED`.

    Args:
        words: words of each text.
        labels: class of each word of each text.
        tokenizer: tokenizer that truncates and pads to `length`.
        length: tokens per sample.
    """

    def __init__(
        self, words: Sequence[list[str]], labels: Sequence[list[int]], tokenizer: Tokenizer, length: int
    ) -> None:
        self.words, self.labels = words, labels
        self.sequence_length = length
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.words)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        indices = [draw % len(self) for draw in draws]
        encoded = self._tokenizer.encode_batch([self.words[index] for index in indices], is_pretokenized=True)
        labels = [
            _labels_of_pieces(each.word_ids, self.labels[index])
            for index, each in zip(indices, encoded, strict=True)
        ]
        return _tensors(encoded) | {"labels": torch.tensor(labels)}


def _tensors(encoded: Sequence[Encoding]) -> Batch:
    """Return the fields of encoded texts that do not depend on labels."""
    return {
        "input_ids": torch.tensor([each.ids for each in encoded]),
        "attention_mask": torch.tensor([each.attention_mask for each in encoded]),
        "token_type_ids": torch.tensor([each.type_ids for each in encoded]),
    }


def _labels_of_pieces(words: Sequence[int | None], labels: Sequence[int]) -> list[int]:
    """Return the label of each token: its word's class for the first token of a word, otherwise `IGNORED`."""
    before = (None, *words[:-1])
    return [
        IGNORED if word is None or word == previous else labels[word]
        for word, previous in zip(words, before, strict=True)
    ]


def read_labelled_texts(
    config: TextClassificationDataConfig, vocab_size: int, num_labels: int
) -> LabelledTexts:
    """Return the data set that a section of a params file describes.

    Args:
        config: the section.
        vocab_size: vocabulary of the model.
        num_labels: classes of the model.

    Raises:
        DataError: if a file is missing, a line cannot be parsed, or a class is not below `num_labels`.
    """
    mnli = config.data_processor == "MNLIDataProcessor"
    part = "train" if config.is_training else ("dev_matched" if mnli else "dev")
    path = _file(config.data_dir, part)
    texts, labels = [], []
    for place, text, label in (_mnli_lines if mnli else _sst2_lines)(path):
        if not 0 <= label < num_labels:
            raise DataError(
                f"expected a class below the model's num_labels={num_labels}, got {label}",
                where=place,
                remedy=f"set num_labels to {label + 1} or more",
            )
        texts.append(text)
        labels.append(label)
    if not texts:
        raise DataError("the file holds no samples", where=str(path), remedy="set another data_dir")
    length = config.max_sequence_length
    tokenizer = wordpiece(config.vocab_file, lower=config.do_lower, length=length, vocab_size=vocab_size)
    return LabelledTexts(texts, labels, tokenizer, length)


def _sst2_lines(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for number, line in read_lines(path):
        text, tab, label = line.rpartition("\t")
        if number == 1 and (text, label) == ("sentence", "label"):
            continue
        if not tab or not text.strip() or not label.isdigit():
            raise _unreadable(path, number, "a sentence, a tab and the number of its class")
        yield f"{path}, line {number}", (text,), int(label)


def _mnli_lines(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    columns: dict[str, int] = {}
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not columns:
            columns = {name: column for column, name in enumerate(fields)}
            if not {"sentence1", "sentence2", "gold_label"} <= columns.keys():
                raise _unreadable(path, number, "the columns sentence1, sentence2 and gold_label")
            continue
        if len(fields) != len(columns):
            raise _unreadable(path, number, f"{counted(len(columns), 'column', 'columns')} as in the header")
        label = fields[columns["gold_label"]]
        if label not in _MNLI_CLASSES:
            raise _unreadable(path, number, f"one of {', '.join(_MNLI_CLASSES)} as gold_label")
        pair = fields[columns["sentence1"]], fields[columns["sentence2"]]
        yield f"{path}, line {number}", pair, _MNLI_CLASSES.index(label)


def read_labelled_tokens(
    config: TokenClassificationDataConfig, vocab_size: int, num_classes: int
) -> LabelledTokens:
    """Return the data set that a section of a params file describes.

    Args:
        config: the section.
        vocab_size: vocabulary of the model.
        num_classes: classes of the model.

    Raises:
        DataError: if a file is missing, a line cannot be parsed, there are more tags than classes, or a tag
            is not in `label_vocab_file`.
    """
    files = [config.data_dir] if config.data_dir.is_file() else _tagged_files(config.data_dir)
    texts = [text for path in files for text in _tagged_texts(path)]
    classes = _classes(config, {tag for text in texts for _, tag, _ in text})
    if len(classes) > num_classes:
        raise DataError(
            f"found {len(classes)} tags, but the model's num_classes is {num_classes}",
            where=f"data_dir: {config.data_dir}",
            remedy=f"set num_classes to {len(classes)}",
        )
    labels = []
    for text in texts:
        for _, tag, place in text:
            if tag not in classes:
                raise DataError(
                    f"the tag {tag!r} is not in label_vocab_file", where=place, remedy="add it to the file"
                )
        labels.append([classes[tag] for _, tag, _ in text])
    length = config.max_sequence_length
    tokenizer = wordpiece(config.vocab_file, lower=config.do_lower, length=length, vocab_size=vocab_size)
    return LabelledTokens([[word for word, _, _ in text] for text in texts], labels, tokenizer, length)


def _classes(config: TokenClassificationDataConfig, tags: set[str]) -> dict[str, int]:
    if config.label_vocab_file is None:
        ordered = sorted(tags, key=lambda tag: (tag != "O", tag))
        return {tag: number for number, tag in enumerate(ordered)}
    try:
        classes = json.loads(config.label_vocab_file.read_text())
        return {str(tag): int(number) for tag, number in classes.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"the classes of the tags cannot be read: {why_unreadable(error)}",
            where=f"label_vocab_file: {config.label_vocab_file}",
            remedy='write a JSON object such as {"O": 0, "B-Chemical": 1}',
        ) from error


def _tagged_files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*") if path.suffix in (".tsv", ".conll", ".txt", ".gz"))
    if not found:
        raise DataError(
            "data_dir holds no .tsv, .conll or .txt file" if folder.is_dir() else "data_dir does not exist",
            where=f"data_dir: {folder}",
            remedy="set data_dir to a folder of files whose lines are a token, a tab and its tag",
        )
    return found


def _tagged_texts(path: Path) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the texts of a file; a text is a list of (word, tag, place in the file)."""
    text: list[tuple[str, str, str]] = []
    for number, line in read_lines(path):
        if not line.strip():
            if text:
                yield text
            text = []
            continue
        word, tab, tag = line.rpartition("\t")
        if not tab or not word or not tag:
            raise _unreadable(path, number, "a token, a tab and its tag")
        text.append((word, tag, f"{path}, line {number}"))
    if text:
        yield text


def _file(folder: Path, part: str) -> Path:
    for name in (f"{part}.tsv", f"{part}.tsv.gz"):
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"data_dir has no {part}.tsv or {part}.tsv.gz",
        where=f"data_dir: {folder}",
        remedy="set data_dir to the folder that holds it",
    )


def _unreadable(path: Path, number: int, expected: str) -> DataError:
    return DataError(
        f"line is malformed: expected {expected}",
        where=f"{path}, line {number}",
        remedy="correct or remove the line",
    )
