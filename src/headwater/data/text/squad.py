"""Questions about texts in the format of SQuAD: windows of contexts, and scores of answers."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headwater.config.data import QuestionDataConfig
from headwater.core.errors import DataError
from headwater.core.files import why_unreadable
from headwater.core.scores import f_beta
from headwater.data.loader import Batch
from headwater.data.text.wordpiece import BEGIN, PAD, SEPARATOR, wordpiece

Numbers = npt.NDArray[np.int64]

_REMEDY = "use a file in the format of SQuAD v1.1"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, and the index of its first character in the context."""

    text: str
    start: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its context, and its right answers. Training uses the first answer."""

    identifier: str
    text: str
    context: str
    answers: tuple[Answer, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of a context that fits into a sample: index of the question, and tokens [start, stop)."""

    question: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Tokens of a text: ids [tokens], and the first and end character of each token [tokens, 2]."""

    numbers: Numbers
    characters: Numbers


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of answers: means over all questions, each in [0, 1].

    Attributes:
        exact_match: fraction of the answers that equal a right answer after normalization.
        f1: mean F1 of the words of an answer and of the best matching right answer.
    """

    exact_match: float
    f1: float


class Windows:
    """A data set of questions with their contexts: `[CLS] question [SEP] context [SEP]`.

    A long context is split into overlapping windows; each window is one sample. A batch has
    `input_ids`, `attention_mask` and `token_type_ids` (1 from the context on), int64 [batch, length]; and
    `start_positions` and `end_positions`, int64 [batch]: the first and last token of the answer, or 0 if the
    window does not contain the whole answer (arXiv:1810.04805, section 4.2).

    Args:
        questions: the questions.
        config: section of the params file.
        vocab_size: vocabulary of the model.

    Raises:
        DataError: if the vocabulary file does not fit the model.
    """

    def __init__(self, questions: Sequence[Question], config: QuestionDataConfig, vocab_size: int) -> None:
        self.questions, self.sequence_length = questions, config.max_sequence_length
        tokenizer = wordpiece(
            config.vocab_file, lower=config.do_lower, length=config.max_sequence_length, vocab_size=vocab_size
        )
        # A long context is split into windows below, so the tokenizer must not cut it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab()
        self._begin, self._separator, self._pad = (vocabulary[name] for name in (BEGIN, SEPARATOR, PAD))

        def tokens_of(texts: list[str]) -> dict[str, _Tokens]:
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            return {
                text: _Tokens(np.array(each.ids), np.array(each.offsets).reshape(-1, 2))
                for text, each in zip(texts, encoded, strict=True)
            }

        asked = tokens_of([question.text for question in questions])
        contexts = tokens_of(list({question.context for question in questions}))
        self._asked = [asked[each.text].numbers[: config.max_query_length] for each in questions]
        self._contexts = [contexts[each.context] for each in questions]
        self.windows = [
            Window(number, start, stop)
            for number in range(len(questions))
            for start, stop in self._places(number, config.doc_stride)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        samples = [self._sample(self.windows[draw % len(self)]) for draw in draws]
        return {name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in samples[0]}

    def answers(self, scores: Sequence[float], begins: Sequence[int], ends: Sequence[int]) -> dict[str, str]:
        """Return the text of the best answer to each question, by the question's identifier.

        Args:
            scores: score of the answer in each window; a question's window with the highest score counts.
            begins: position in the sample of the first token of each answer.
            ends: position in the sample of the last token of each answer.
        """
        best: dict[int, float] = {}
        texts: dict[str, str] = {}
        for window, score, begin, end in zip(self.windows, scores, begins, ends, strict=True):
            if score > best.get(window.question, -np.inf):
                best[window.question] = score
                texts[self.questions[window.question].identifier] = self._text(window, begin, end)
        return texts

    def _text(self, window: Window, begin: int, end: int) -> str:
        shift = window.start - self._offset(window.question)
        characters = self._contexts[window.question].characters
        if not window.start <= begin + shift <= end + shift < window.stop:
            return ""
        return self.questions[window.question].context[
            characters[begin + shift][0] : characters[end + shift][1]
        ]

    def _offset(self, question: int) -> int:
        """Return the position of the first token of the context in the samples of a question."""
        return len(self._asked[question]) + 2

    def _places(self, question: int, stride: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens [start, stop) of the context in each window of a question."""
        room = self.sequence_length - self._offset(question) - 1
        count, start = len(self._contexts[question].numbers), 0
        while start + room < count:
            yield start, start + room
            start += min(stride, room)
        yield start, count

    def _sample(self, window: Window) -> dict[str, Numbers]:
        context, offset = self._contexts[window.question], self._offset(window.question)
        first = np.concatenate([[self._begin], self._asked[window.question], [self._separator]])
        second = np.append(context.numbers[window.start : window.stop], self._separator)
        count = len(first) + len(second)
        ids = np.full(self.sequence_length, self._pad, dtype=np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        ids[:count], mask[:count], types[offset:count] = np.concatenate([first, second]), 1, 1
        begin, end = self._span(window)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": types,
            "start_positions": np.array(begin),
            "end_positions": np.array(end),
        }

    def _span(self, window: Window) -> tuple[int, int]:
        """Return the positions of the first and last token of the answer; (0, 0) if some are missing."""
        answer = self.questions[window.question].answers[0]
        characters = self._contexts[window.question].characters
        begins_before_end = characters[:, 0] < answer.start + len(answer.text)
        inside = np.flatnonzero(begins_before_end & (characters[:, 1] > answer.start))
        if not len(inside) or inside[0] < window.start or inside[-1] >= window.stop:
            return 0, 0
        shift = self._offset(window.question) - window.start
        return int(inside[0]) + shift, int(inside[-1]) + shift


def read_windows(config: QuestionDataConfig, vocab_size: int) -> Windows:
    """Return the data set that a section of a params file describes.

    Raises:
        DataError: if a file is missing or malformed, or the vocabulary file does not fit the model.
    """
    questions = read_questions(config.data_dir)
    if config.held_out_dir is not None and config.is_training:
        held_out = {same_letters(question.context) for question in read_questions(config.held_out_dir)}
        questions = [question for question in questions if same_letters(question.context) not in held_out]
    if not questions:
        raise DataError(
            "no questions are left: all contexts of data_dir are also in held_out_dir",
            where=f"data_dir: {config.data_dir}",
            remedy="use other data, or remove held_out_dir",
        )
    return Windows(questions, config, vocab_size)


def same_letters(text: str) -> str:
    """Return the text in lower case without whitespace, for comparisons that ignore tokenization."""
    return "".join(text.lower().split())


def read_questions(place: Path) -> list[Question]:
    """Return the questions of a file in the format of SQuAD v1.1, or of all such files in a folder.

    Raises:
        DataError: if the files hold no question, or a file is damaged or malformed.
    """
    files = [place] if place.is_file() else []
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.name.endswith((".json", ".json.gz")))
    questions = [question for path in files for question in _questions(path)]
    if not questions:
        raise DataError(
            "the files hold no questions" if files else "data_dir has no .json or .json.gz file",
            where=f"data_dir: {place}",
            remedy=_REMEDY,
        )
    return questions


def _questions(path: Path) -> Iterator[Question]:
    try:
        content = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes())
        articles: list[dict[str, Any]] = json.loads(content)["data"]
        found = [
            Question(
                str(asked["id"]),
                asked["question"],
                paragraph["context"],
                tuple(Answer(each["text"], each["answer_start"]) for each in asked["answers"]),
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        what = f"the questions cannot be read: {why_unreadable(error)}"
        raise DataError(what, where=str(path), remedy=_REMEDY) from error
    for question in found:
        for answer in question.answers:
            if not question.context.startswith(answer.text, answer.start):
                raise DataError(
                    f"the answer {answer.text!r} is not at character {answer.start} of its context",
                    where=f"{path}, question {question.identifier}",
                    remedy="correct answer_start, or remove the question",
                )
        if not question.answers:
            raise DataError(
                "the question has no answer",
                where=f"{path}, question {question.identifier}",
                remedy="remove it; questions without an answer (SQuAD v2.0) are not supported",
            )
    yield from found


def score(predictions: Mapping[str, str], questions: Sequence[Question]) -> Scores:
    """Return exact match and F1 of predicted answers (arXiv:1606.05250, section 6.1).

    If a question has several right answers, the best match counts. Texts are normalized first: lower case,
    without punctuation and without the words a, an and the.

    Args:
        predictions: predicted answers by identifier of the question; a missing answer is wrong.
        questions: questions with their right answers.
    """
    exact, overlap = 0.0, 0.0
    for question in questions:
        words = _words(predictions.get(question.identifier, ""))
        right = [_words(answer.text) for answer in question.answers]
        exact += max(words == each for each in right)
        overlap += max(_word_f1(words, each) for each in right)
    return Scores(exact / len(questions), overlap / len(questions))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _word_f1(found: list[str], right: list[str]) -> float:
    """Return the harmonic mean of precision and recall of the words."""
    shared = (collections.Counter(found) & collections.Counter(right)).total()
    return f_beta(shared, len(right), len(found)) if shared else 0.0
