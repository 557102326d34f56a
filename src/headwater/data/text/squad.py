"""Questions about texts, as SQuAD distributes them: their windows, and how well they were answered."""

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
from headwater.core.scores import f_beta
from headwater.data.loader import Batch
from headwater.data.text.wordpiece import BEGIN, PAD, SEPARATOR, wordpiece

Numbers = npt.NDArray[np.int64]

_REMEDY = "name a file in the format of SQuAD v1.1"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, and the character of the context that it begins at."""

    text: str
    start: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, the text that it is about, and its answers, the first of which is learnt."""

    identifier: str
    text: str
    context: str
    answers: tuple[Answer, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of the context of a question, of which it is the number."""

    question: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Numbers of the tokens of a text, and the characters that each stands for, [tokens, 2]."""

    numbers: Numbers
    characters: Numbers


@dataclasses.dataclass(frozen=True)
class Scores:
    """How well questions were answered: shares between 0 and 1, means over the questions.

    Attributes:
        exact_match: of answers that are the right one to the word.
        f1: of words that answer and right answer share.
    """

    exact_match: float
    f1: float


class Windows:
    """Questions with their contexts, `[CLS] question [SEP] context [SEP]`, long contexts in several windows.

    A batch is `input_ids`, `attention_mask` and `token_type_ids` [batch, length] (1 from the context on), and
    `start_positions` and `end_positions` [batch]: the first and last token of the answer, or 0 where the
    window does not hold all of it (arXiv:1810.04805, section 4.2).

    Args:
        questions: the questions.
        config: the section of the params file.
        vocab_size: the model's.

    Raises:
        DataError: if the tokens do not fit the model.
    """

    def __init__(self, questions: Sequence[Question], config: QuestionDataConfig, vocab_size: int) -> None:
        self.questions, self.sequence_length = questions, config.max_sequence_length
        tokenizer = wordpiece(
            config.vocab_file, lower=config.do_lower, length=config.max_sequence_length, vocab_size=vocab_size
        )
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
        """The batch of these samples; see `headwater.data.source.Samples`."""
        samples = [self._sample(self.windows[draw % len(self)]) for draw in draws]
        return {name: torch.from_numpy(np.stack([each[name] for each in samples])) for name in samples[0]}

    def answers(self, scores: Sequence[float], begins: Sequence[int], ends: Sequence[int]) -> dict[str, str]:
        """The text of the best answer to each question, by its identifier.

        Args:
            scores: of the answer in each window; the highest of a question's windows counts.
            begins: its first token, a place in the sample.
            ends: its last token.
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
        """Place of the context in a sample."""
        return len(self._asked[question]) + 2

    def _places(self, question: int, stride: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each window in the context's tokens."""
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
        """First and last token of the answer in a sample; 0 and 0 where it does not hold all of it."""
        answer = self.questions[window.question].answers[0]
        characters = self._contexts[window.question].characters
        begins_before_end = characters[:, 0] < answer.start + len(answer.text)
        inside = np.flatnonzero(begins_before_end & (characters[:, 1] > answer.start))
        if not len(inside) or inside[0] < window.start or inside[-1] >= window.stop:
            return 0, 0
        shift = self._offset(window.question) - window.start
        return int(inside[0]) + shift, int(inside[-1]) + shift


def read_windows(config: QuestionDataConfig, vocab_size: int) -> Windows:
    """The samples that a section of a params file names.

    Raises:
        DataError: if a file is missing or not of this form, or the tokens do not fit the model.
    """
    questions = read_questions(config.data_dir)
    if config.held_out_dir is not None and config.is_training:
        held_out = {same_letters(question.context) for question in read_questions(config.held_out_dir)}
        questions = [question for question in questions if same_letters(question.context) not in held_out]
    if not questions:
        raise DataError(
            "all questions are about texts that are held out",
            where=f"data_dir: {config.data_dir}",
            remedy="name other data, or leave out held_out_dir",
        )
    return Windows(questions, config, vocab_size)


def same_letters(text: str) -> str:
    """What of a text stays the same when it is written in lower case or cut into words."""
    return "".join(text.lower().split())


def read_questions(place: Path) -> list[Question]:
    """The questions of a file in the format of SQuAD v1.1, or of all those in a folder.

    Raises:
        DataError: if there are none, or a file is damaged or not of this form.
    """
    files = [place] if place.is_file() else []
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.name.endswith((".json", ".json.gz")))
    questions = [question for path in files for question in _questions(path)]
    if not questions:
        raise DataError(
            "there are no questions" if files else "there is no .json or .json.gz file",
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
        raise DataError(f"cannot read the questions: {error!r}", where=str(path), remedy=_REMEDY) from error
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
                remedy="remove it; questions without an answer (SQuAD v2.0) are not understood",
            )
    yield from found


def score(predictions: Mapping[str, str], questions: Sequence[Question]) -> Scores:
    """Exact match and F1 of answers (arXiv:1606.05250, section 6.1).

    Of several right answers that counts which fits best. Texts are compared in lower case, without
    punctuation and the words a, an and the.

    Args:
        predictions: an answer to each question, by its identifier; one that is missing is wrong.
        questions: what was asked, with the right answers.
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
    """The harmonic mean of precision and recall of the words."""
    shared = (collections.Counter(found) & collections.Counter(right)).total()
    return f_beta(shared, len(right), len(found)) if shared else 0.0
