"""Fast tokenization with a table of words: each distinct word is tokenized only once.

Byte-pair tokenizers first split a text into words, and the tokens of a word depend only on the word. Most
words of a text have occurred before, so a table of them saves most of the work.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_MOST_WORDS = 1 << 18
"""Maximum words in the table; at about 300 bytes per word it takes less than 80 MB."""

# The words of GPT-2's byte-level tokenizer (section 2.2 of "Language models are unsupervised multitask
# learners") in ASCII text. A word next to a non-ASCII character matches the last alternative instead. This
# matches all text up to the next gap between two words, and the tokenizer splits it into words.
_NO_OTHER = r"(?![^\t-\r -~])"
_WORDS = re.compile(
    "|".join(
        (
            r"'(?:[stmd]|re|ve|ll)",
            rf" ?[A-Za-z]++{_NO_OTHER}",
            rf" ?[0-9]++{_NO_OTHER}",
            rf" ?[!-/:-@\[-`{{-~]++{_NO_OTHER}",
            rf"(?=[\t-\r ]++{_NO_OTHER})[\t-\r ]+(?![!-~])",
            r"[\t-\r](?=[!-~])",
            r"(?s:.)+?(?=(?<=\w) \w|\Z)",
        )
    )
)


class TextEncoder:
    """An encoder of texts to token ids, without the special tokens that a tokenizer adds around a text.

    Args:
        tokenizer: any tokenizer; those that split words like GPT-2's use the fast table.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._words = _Words(tokenizer)
        content = json.loads(tokenizer.to_str())
        self._by_words = content["normalizer"] is None and _cuts_as_gpt2(content["pre_tokenizer"])
        self._special = [token["content"] for token in content["added_tokens"]]
        self._continuing = _without_prefix(content, tokenizer)

    def __call__(self, texts: Sequence[str], continued: Sequence[bool] = ()) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of each text, [tokens].

        Args:
            texts: whole documents or pieces of them.
            continued: for each text, True if it is not the first piece of its document; by default all False.
        """
        # `_WORDS` would split a special token into several words.
        if self._by_words and not any(special in text for special in self._special for text in texts):
            return [self._looked_up(text) for text in texts]
        later = list(continued) or [False] * len(texts)
        groups = {
            kind: iter(self._encode(tokenizer, list(itertools.compress(texts, chosen))))
            for kind, tokenizer, chosen in (
                (False, self.tokenizer, [not is_later for is_later in later]),
                (True, self._continuing, later),
            )
        }
        return [next(groups[is_later]) for is_later in later]

    @staticmethod
    def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _looked_up(self, text: str) -> npt.NDArray[np.int32]:
        if len(self._words) > _MOST_WORDS:
            self._words.clear()
        tokens = map(self._words.__getitem__, _WORDS.findall(text))
        return np.fromiter(itertools.chain.from_iterable(tokens), dtype=np.int32)


class _Words(dict[str, list[int]]):
    """Word -> its tokens. A word that is looked up for the first time is tokenized and added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        self[word] = tokens
        return tokens


def _without_prefix(content: dict[str, Any], tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that puts no space before a text, for all pieces of a document but the first."""
    steps = {**content, **{key: _plain(content[key]) for key in ("normalizer", "pre_tokenizer")}}
    return tokenizer if steps == content else Tokenizer.from_str(json.dumps(steps))


def _plain(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without the parts that put a space before the text."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            return {**step, key: [part for part in map(_plain, step[key]) if part is not None]}
    return step


def _cuts_as_gpt2(pre_tokenizer: dict[str, object] | None) -> bool:
    """True if the pre-tokenizer splits text into the words of `_WORDS`."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return pre_tokenizer is not None and plain.items() <= pre_tokenizer.items()
