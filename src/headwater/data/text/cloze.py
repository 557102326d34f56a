"""Cloze questions made from running text, for pretraining on questions without human annotation.

A span is removed from a sentence and replaced by a question word. Words around it are dropped or lose their
endings. The removed span is the answer (arXiv:1804.00720, section 3; the noise follows arXiv:1906.04980,
section 2.3). A model trained on these questions learns to find the words of a question in a text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from headwater.core.errors import DataError
from headwater.core.files import disk_errors
from headwater.core.seeding import derive_seed
from headwater.data.text.squad import Answer, Question, same_letters

Kind = Literal["date", "number", "name", "other"]

_WORD = re.compile(r"\w+(?:[-'’.,]\w+)*%?|[^\w\s]")
_SENTENCE_END = re.compile(r"[.!?][\"'”)\]]*\s+(?=[\"'“(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Dr|St|Jr|Sr|vs|[A-Z])\.$")
_YEAR = re.compile(r"(?:1\d|20)\d\d")
_ENDINGS = ("ing", "ed", "es", "s", "ly")

_CALENDAR = (
    "january february march april may june july august september october november december monday tuesday "
    "wednesday thursday friday saturday sunday century"
)
_FUNCTION_WORDS = (
    "a an the of in on at to for from by with as and or but nor so yet is are was were be been being am has "
    "have had having do does did will would can could may might must shall should not no it its he she they "
    "them his her their this that these those which who whom whose what when where how why there here than "
    "then also such into onto over under between among about after before during through while if because "
    "although however both each all any some more most other another only own same very just up down out off "
    "again once i you we me my your our us him himself herself itself themselves s t"
)
_OF_DATES = frozenset(_CALENDAR.split())
_WITHOUT_CONTENT = frozenset(_FUNCTION_WORDS.split())
_INTERROGATIVES: dict[Kind, tuple[str, ...]] = {
    "date": ("when", "when", "what year", "in what year", "what date"),
    "number": ("how many", "how many", "how much", "what number of", "what percentage"),
    "name": ("who", "who", "what", "what", "which", "where", "where", "what is the name of"),
    "other": ("what", "what", "what", "how", "which", "why", "what kind of", "what type of"),
}
_WEIGHTS: dict[Kind, int] = {"date": 4, "number": 4, "name": 3, "other": 1}
"""Relative probability of a span by its kind: people ask for dates, numbers and names most often."""


@dataclasses.dataclass(frozen=True)
class ClozeSettings:
    """Settings of the generation of cloze questions.

    Attributes:
        min_words: minimum words and punctuation marks of a passage.
        max_words: maximum words and punctuation marks of a passage.
        questions: maximum questions about a passage.
        shortest_sentence: minimum words and punctuation marks of a sentence with a question.
        seed: seed of all random choices.
    """

    min_words: int = 25
    max_words: int = 60
    questions: int = 4
    shortest_sentence: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class _Word:
    """A word or punctuation mark of a sentence, and its characters [start, stop) in the passage."""

    text: str
    start: int
    stop: int

    @property
    def has_content(self) -> bool:
        return self.text[0].isalnum() and self.text.lower() not in _WITHOUT_CONTENT


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the characters [start, stop) of each sentence of a paragraph."""
    ends = [
        found.end()
        for found in _SENTENCE_END.finditer(text)
        if not _ABBREVIATION.search(text, max(0, found.start() - 8), found.start() + 1)
    ]
    return list(zip([0, *ends], [*ends, len(text)], strict=True))


def passages(paragraph: str, settings: ClozeSettings) -> Iterator[str]:
    """Yield passages: runs of whole sentences of a paragraph with `min_words` to `max_words` words."""
    first = last = count = 0
    # The empty sentence at the end completes the last passage.
    for start, stop in [*sentences(paragraph), (len(paragraph), len(paragraph))]:
        words = len(_WORD.findall(paragraph, start, stop))
        if count + words > settings.max_words or start == stop:
            if settings.min_words <= count <= settings.max_words:
                yield paragraph[first:last].strip()
            first, count = start, 0
        last, count = stop, count + words


def cloze_questions(passage: str, settings: ClozeSettings) -> list[Question]:
    """Return questions about a passage; the same passage and settings produce the same questions."""
    generator = random.Random(derive_seed(settings.seed, "cloze", passage))
    # Spans are drawn with replacement, so a passage with few spans has several questions about the same span.
    choices = [
        (words, run)
        for start, stop in sentences(passage)
        if len(words := _words(passage, start, stop)) >= settings.shortest_sentence
        for run in _runs(words)
    ]
    if not choices:
        return []
    weights = [_WEIGHTS[_kind(words[slice(*run)], run[0])] for words, run in choices]
    found: list[Question] = []
    for words, run in generator.choices(choices, weights, k=settings.questions):
        begin, end, kind = _answer(generator, words, *run)
        asked = _question(generator, words[:begin], words[end:], kind)
        if asked is not None:
            start = words[begin].start
            answer = Answer(passage[start : words[end - 1].stop], start)
            identifier = hashlib.sha256(f"{passage}\n{len(found)}".encode()).hexdigest()[:16]
            found.append(Question(identifier, asked, passage, (answer,)))
    return found


def write_cloze_questions(
    paragraphs: Iterable[str],
    path: Path,
    settings: ClozeSettings | None = None,
    held_out: Sequence[str] = (),
) -> int:
    """Write cloze questions about texts in the format of SQuAD v1.1, and return their number.

    Args:
        paragraphs: paragraphs of running text; repeated passages are left out.
        path: JSON file to write.
        settings: settings of the questions; by default `ClozeSettings()`.
        held_out: texts for evaluation; passages that contain one of their sentences are left out.

    Returns:
        The number of questions.

    Raises:
        DataError: if no question can be made from the texts.
        DiskFullError: if the disk is full.
    """
    settings = settings or ClozeSettings()
    unwanted = {same_letters(text[start:stop]) for text in held_out for start, stop in sentences(text)}
    seen: set[str] = set()
    records = []
    for passage in (part for paragraph in paragraphs for part in passages(paragraph, settings)):
        inside = {same_letters(passage[start:stop]) for start, stop in sentences(passage)}
        letters = same_letters(passage)
        if letters in seen or inside & unwanted:
            continue
        seen.add(letters)
        if questions := cloze_questions(passage, settings):
            records.append({"context": passage, "qas": [_record(question) for question in questions]})
    if not records:
        raise DataError(
            "no question can be made from these texts",
            where=str(path),
            remedy=f"use paragraphs of whole sentences with {settings.min_words} or more words",
        )
    with disk_errors(path):
        path.write_text(json.dumps({"version": "1.1", "data": [{"title": "cloze", "paragraphs": records}]}))
    return sum(len(record["qas"]) for record in records)


def _words(passage: str, start: int, stop: int) -> list[_Word]:
    return [_Word(found.group(), *found.span()) for found in _WORD.finditer(passage, start, stop)]


def _runs(words: Sequence[_Word]) -> list[tuple[int, int]]:
    """Return [start, stop) of each run of content words: a name, a number with its unit, or other words."""
    runs: list[tuple[int, int]] = []
    for place, word in enumerate(words):
        if not word.has_content:
            continue
        begin, end = runs[-1] if runs else (0, 0)
        if end == place > begin and not _is_boundary(words[place - 1].text, word.text):
            runs[-1] = begin, place + 1
        else:
            runs.append((place, place + 1))
    return runs


def _is_boundary(word: str, following: str) -> bool:
    """True if a name or number begins at `following`, or a name ends at `word`, the word before it."""
    if following[0].islower():
        return word[0].isupper()
    return word[0].islower()


def _kind(answer: Sequence[_Word], place: int) -> Kind:
    texts = [word.text for word in answer]
    if any(_YEAR.fullmatch(text) or text.lower() in _OF_DATES for text in texts):
        return "date"
    if any(text[0].isdigit() for text in texts):
        return "number"
    # The first word of a sentence always has a capital letter, which does not show that it is a name.
    return "name" if place > 0 and all(text[0].isupper() for text in texts) else "other"


def _answer(generator: random.Random, words: Sequence[_Word], begin: int, end: int) -> tuple[int, int, Kind]:
    """Return an answer [start, stop) and its kind.

    The answer is the whole run of words if this is a date, number or name. If another run is long, the answer
    is a random part of it. If it is short, the words after it are sometimes added.
    """
    kind = _kind(words[begin:end], begin)
    if kind != "other":
        return begin, end, kind
    if end - begin > 4:
        size = generator.randint(1, 4)
        begin = generator.randint(begin, end - size)
        return begin, begin + size, kind
    if generator.random() < 0.3:
        further = min(end + generator.randint(1, 6), len(words))
        end = max(place + 1 for place in range(begin, further) if words[place].has_content)
    return begin, end, kind


def _question(
    generator: random.Random, before: Sequence[_Word], after: Sequence[_Word], kind: Kind
) -> str | None:
    """Return a question for the span between two parts of a sentence, or `None` if too few words are left."""
    dropped_function_words, dropped = generator.uniform(0.2, 0.9), generator.uniform(0.0, 0.6)
    reach = generator.choice((5, 8, 12, 40))

    def kept(words: Sequence[_Word]) -> list[_Word]:
        rates = {True: dropped, False: dropped_function_words}
        return [w for w in words if w.text[0].isalnum() and generator.random() >= rates[w.has_content]]

    left, right = kept(before[-reach:]), kept(after[:reach])
    if sum(word.has_content for word in left + right) < 2:
        return None
    first, second = ([_reduced(generator, word.text.lower()) for word in part] for part in (left, right))
    asked = [generator.choice(_INTERROGATIVES[kind])]
    order = generator.random()
    if order < 0.45:
        parts = [*asked, *first, *second]
    elif order < 0.8:
        parts = [*asked, *second, *first]
    elif order < 0.9:
        parts = [*first, *asked, *second]
    else:
        parts = [*asked, *generator.sample(first + second, len(first) + len(second))]
    return " ".join(parts) + "?"


def _reduced(generator: random.Random, word: str) -> str:
    """Return a word, sometimes without its ending: real questions use other forms of the words of a text."""
    if generator.random() >= 0.15:
        return word
    ending = next((each for each in _ENDINGS if word.endswith(each) and len(word) > len(each) + 3), "")
    return word.removesuffix(ending)


def _record(question: Question) -> dict[str, object]:
    answers = [{"text": answer.text, "answer_start": answer.start} for answer in question.answers]
    return {"id": question.identifier, "question": question.text, "answers": answers}
