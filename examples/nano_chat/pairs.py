"""Messages, answers and preferences that are made from a text, always the same ones for the same text."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

SHORTEST, LONGEST = 6, 24
"""Words of a sentence that becomes an answer."""
CONTINUE, MENTION = "Continue: {}", "Write a sentence with the word {}."
_RAREST, _MOST_COMMON = 5, 400
"""Uses in the text of a word that a message may ask for."""
_PER_WORD = 5
"""Most examples for each such word."""

Record = dict[str, Any]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text that have `SHORTEST` to `LONGEST` words, without line breaks."""
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    found = (each for paragraph in paragraphs for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph))
    whole = re.compile(r"[A-Z][A-Za-z ,;’'-]*[.!?]")
    return [each for each in found if whole.fullmatch(each) and SHORTEST <= len(each.split()) <= LONGEST]


def words_of(sentence: str) -> list[str]:
    """Return the words of a sentence in lower case."""
    return re.findall(r"[a-z]+", sentence.lower())


def mentions(answer: str, word: str) -> bool:
    """Return true if an answer has a word."""
    return word in words_of(answer)


def topics(found: Sequence[str]) -> dict[str, list[str]]:
    """Return sentences by a word of four letters or more that is neither rare nor very common."""
    uses = Counter(word for sentence in found for word in set(words_of(sentence)))
    by_word: dict[str, list[str]] = {}
    for sentence in found:
        for word in dict.fromkeys(words_of(sentence)):
            if len(word) >= 4 and _RAREST <= uses[word] <= _MOST_COMMON:
                by_word.setdefault(word, []).append(sentence)
    return by_word


def held_out(found: Sequence[str]) -> list[str]:
    """Return the words about which no training data ask: every tenth one."""
    return sorted(topics(found))[::10]


def conversations(found: Sequence[str], seed: int) -> list[Record]:
    """Return conversations of one message and one answer: sentences to continue, and words to mention."""
    chance, tested = random.Random(seed), set(held_out(found))
    records = []
    for sentence in found:
        parts = sentence.split()
        half = len(parts) // 2
        records.append(_talk(CONTINUE.format(" ".join(parts[:half])), " ".join(parts[half:])))
    for word, having in topics(found).items():
        if word not in tested:
            examples = chance.sample(having, min(len(having), _PER_WORD))
            records += [_talk(MENTION.format(word), sentence) for sentence in examples]
    chance.shuffle(records)
    return records


def preferences(found: Sequence[str], seed: int) -> list[Record]:
    """Return pairs of answers: the better one has the word of the message, the worse one does not."""
    chance, tested = random.Random(seed), set(held_out(found))
    records = []
    for word, having in topics(found).items():
        for better in chance.sample(having, min(len(having), _PER_WORD)) if word not in tested else ():
            worse = chance.choice(found)
            if not mentions(worse, word):
                talk = _talk(MENTION.format(word), better)["messages"]
                rejected = [{"role": "assistant", "content": worse}]
                records.append({"prompt": talk[:1], "chosen": talk[1:], "rejected": rejected})
    chance.shuffle(records)
    return records


def _talk(message: str, answer: str) -> Record:
    return {"messages": [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]}
