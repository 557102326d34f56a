"""Questions made of running text, for training before there are real ones.

Of a sentence a stretch is left out, an interrogative takes its place, and words around it are dropped or lose
their endings; what was left out is the answer (arXiv:1804.00720, section 3; the noise is that of
arXiv:1906.04980, section 2.3). Whoever answers these has learnt to find the words of a question in a text.
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
"""How likely a stretch is chosen: people ask for names and numbers more often than for the rest."""


@dataclasses.dataclass(frozen=True)
class ClozeSettings:
    """What questions are made.

    Attributes:
        min_words: of a passage, words and signs.
        max_words: likewise.
        questions: of a passage, at most.
        shortest_sentence: words and signs of a sentence that is asked about.
        seed: of all that is random.
    """

    min_words: int = 25
    max_words: int = 60
    questions: int = 4
    shortest_sentence: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class _Word:
    """A word or sign of a sentence, and where it lies in the passage."""

    text: str
    start: int
    stop: int

    @property
    def has_content(self) -> bool:
        return self.text[0].isalnum() and self.text.lower() not in _WITHOUT_CONTENT


def sentences(text: str) -> list[tuple[int, int]]:
    """First character of each sentence of a paragraph, and that after its last."""
    ends = [
        found.end()
        for found in _SENTENCE_END.finditer(text)
        if not _ABBREVIATION.search(text, max(0, found.start() - 8), found.start() + 1)
    ]
    return list(zip([0, *ends], [*ends, len(text)], strict=True))


def passages(paragraph: str, settings: ClozeSettings) -> Iterator[str]:
    """Runs of whole sentences of a paragraph, each with as many words as the settings allow."""
    first = last = count = 0
    for start, stop in [*sentences(paragraph), (len(paragraph), len(paragraph))]:
        words = len(_WORD.findall(paragraph, start, stop))
        if count + words > settings.max_words or start == stop:
            if settings.min_words <= count <= settings.max_words:
                yield paragraph[first:last].strip()
            first, count = start, 0
        last, count = stop, count + words


def cloze_questions(passage: str, settings: ClozeSettings) -> list[Question]:
    """Questions about a passage; the same passage and settings give the same ones."""
    generator = random.Random(derive_seed(settings.seed, "cloze", passage))
    # A passage with few names asks for some of them in several ways.
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
    """Writes questions about texts in the format of SQuAD v1.1; how many there are.

    Args:
        paragraphs: running text, a paragraph each; passages that were there before are left out.
        path: the file to write, .json.
        settings: what questions are made.
        held_out: texts of which no sentence may be in a passage.

    Raises:
        DataError: if no question can be made of the texts.
        DiskFullError: if there is no room.
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
            "no question can be made of these texts",
            where=str(path),
            remedy=f"give paragraphs of {settings.min_words} words and more, in sentences",
        )
    with disk_errors(path):
        path.write_text(json.dumps({"version": "1.1", "data": [{"title": "cloze", "paragraphs": records}]}))
    return sum(len(record["qas"]) for record in records)


def _words(passage: str, start: int, stop: int) -> list[_Word]:
    return [_Word(found.group(), *found.span()) for found in _WORD.finditer(passage, start, stop)]


def _runs(words: Sequence[_Word]) -> list[tuple[int, int]]:
    """Begin and end of each run of words that have content: names, numbers with what they count, the rest."""
    runs: list[tuple[int, int]] = []
    for place, word in enumerate(words):
        if not word.has_content:
            continue
        begin, end = runs[-1] if runs else (0, 0)
        if end == place > begin and not _begins_anew(words[place - 1].text, word.text):
            runs[-1] = begin, place + 1
        else:
            runs.append((place, place + 1))
    return runs


def _begins_anew(word: str, following: str) -> bool:
    """Whether a name or number begins with the second of two words, or a name has ended before it."""
    if following[0].islower():
        return word[0].isupper()
    return word[0].islower()


def _kind(answer: Sequence[_Word], place: int) -> Kind:
    texts = [word.text for word in answer]
    if any(_YEAR.fullmatch(text) or text.lower() in _OF_DATES for text in texts):
        return "date"
    if any(text[0].isdigit() for text in texts):
        return "number"
    # The first word of a sentence is always written large.
    return "name" if place > 0 and all(text[0].isupper() for text in texts) else "other"


def _answer(generator: random.Random, words: Sequence[_Word], begin: int, end: int) -> tuple[int, int, Kind]:
    """The answer out of a run of words: the run, a part of a long one, or more than it."""
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
    """A question for what stood between two parts of a sentence; `None` if too little is left of them."""
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
    """Now and then a word without its ending: questions have other forms of the words of a text."""
    if generator.random() >= 0.15:
        return word
    ending = next((each for each in _ENDINGS if word.endswith(each) and len(word) > len(each) + 3), "")
    return word.removesuffix(ending)


def _record(question: Question) -> dict[str, object]:
    answers = [{"text": answer.text, "answer_start": answer.start} for answer in question.answers]
    return {"id": question.identifier, "question": question.text, "answers": answers}
