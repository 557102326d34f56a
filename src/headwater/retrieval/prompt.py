"""Prompts with passages: a template, and the passages that fit into the context of a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from headwater.core.errors import ConfigError, DataError
from headwater.core.units import counted
from headwater.retrieval.index import Hit

_FIELD = re.compile(r"\{(passages|prompt)\}")


@dataclasses.dataclass(frozen=True)
class PassageTemplate:
    """The text of a prompt with passages.

    Attributes:
        text: a text with `{passages}` and `{prompt}`. Other braces have no meaning.

    Raises:
        ConfigError: if one of the two is missing.
    """

    text: str = "{passages}\n\n{prompt}"

    def __post_init__(self) -> None:
        missing = {"passages", "prompt"} - set(_FIELD.findall(self.text))
        if missing:
            raise ConfigError(
                f"expected {{passages}} and {{prompt}} in the template, found no {{{min(missing)}}}",
                where="--template",
                remedy="write {passages} where the passages belong, and {prompt} where the prompt belongs",
            )

    def prompt(self, hits: Sequence[Hit], prompt: str) -> str:
        """Return a prompt with numbered passages."""
        passages = (hit.passage for hit in hits)
        listed = (
            f"[{number}] {each.title}\n{each.text}" if each.title else f"[{number}] {each.text}"
            for number, each in enumerate(passages, start=1)
        )
        values = {"passages": "\n\n".join(listed), "prompt": prompt}
        # Both are replaced at once, so that `{prompt}` in a passage stays as it is.
        return _FIELD.sub(lambda match: values[match[1]], self.text)


@dataclasses.dataclass(frozen=True)
class FittedPrompt:
    """A prompt with the passages that fit.

    Attributes:
        tokens: its token ids.
        hits: the passages in it, the best one first.
    """

    tokens: list[int]
    hits: Sequence[Hit]


def fitted(hits: Sequence[Hit], tokens_of: Callable[[Sequence[Hit]], list[int]], most: int) -> FittedPrompt:
    """Return the prompt with as many of the best passages as fit.

    Args:
        hits: the passages, the best one first; at least one.
        tokens_of: returns the tokens of a prompt with some of them.
        most: most tokens of a prompt.

    Raises:
        DataError: if the prompt does not fit even with only the best passage.
    """
    tokens: list[int] = []
    for count in range(len(hits), 0, -1):
        tokens = tokens_of(hits[:count])
        if len(tokens) <= most:
            return FittedPrompt(tokens, hits[:count])
    raise DataError(
        f"expected a prompt of at most {counted(max(most, 0), 'token', 'tokens')}, which leaves room for "
        f"the new tokens; with only the best passage it has {len(tokens)}",
        where="--passages",
        remedy="request fewer new tokens (--max_new_tokens), shorten the prompt, use a model with more "
        "positions, or make the index again with smaller --passage_words",
    )
