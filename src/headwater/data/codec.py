"""The tokenizer of a language model with its special tokens and its chat template."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError, DataError
from headwater.core.packages import importing
from headwater.core.side_files import end_tokens, special_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_LONG = 10_000
"""Number of characters or tokens that take the tokenizer a few milliseconds."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encodes and decodes texts for one model.

    Attributes:
        tokenizer: the tokenizer.
        folder: folder with the tokenizer's other files, such as the chat template.
        ends: ids of the tokens that end a text; at least one.
        prefix: id of the token before a text without context: the beginning-of-text token, or else the
            first end.
    """

    tokenizer: Tokenizer
    folder: Path
    ends: tuple[int, ...]
    prefix: int

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            special: add the tokens that the tokenizer puts around texts. If not given, they are added unless
                the text begins with one of them already, as the text of a chat template does.
        """
        if special is None:
            special = not text.startswith(str(self.tokenizer.id_to_token(self.prefix)))
        if len(text) < _LONG:
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)
        # `encode` holds the lock of the interpreter, so all other threads would wait. This call releases it.
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        if len(tokens) < _LONG:
            return str(self.tokenizer.decode(tokens))
        return str(self.tokenizer.decode_batch([tokens])[0])  # releases the lock of the interpreter

    @property
    def chat_template(self) -> str:
        """The chat template.

        Raises:
            ConfigError: if the tokenizer lacks a chat template.
        """
        from headwater.data.modes.chat import find_template

        template = find_template(self.folder)
        if template is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                where=str(self.folder),
                remedy="put a chat_template.jinja beside tokenizer.json, or leave out --apply_chat_template",
            )
        return template

    def conversation(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        """Return the text of a conversation.

        Args:
            messages: `role` and `content` of each message.
            prompt: end with the beginning of an answer. Otherwise the text ends with the last message's
                content, which the model continues.
        """
        text = self._rendered(self.chat_template, messages, prompt=prompt)
        if prompt:
            return text
        content = messages[-1]["content"].strip()
        return text[: text.rindex(content) + len(content)]

    def answer_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of an answer.

        A tokenizer without a chat template gets a plain one.

        Args:
            messages: `role` and `content` of each message.
        """
        from headwater.data.modes.chat import PLAIN_TEMPLATE, find_template

        template = find_template(self.folder) or PLAIN_TEMPLATE
        # A chat template writes the special tokens itself. It may also write the date.
        text = self._rendered(template, messages, prompt=True, strftime_now=datetime.now().strftime)
        return self.encode(text, special=False)

    def _rendered(
        self, template: str, messages: list[dict[str, str]], *, prompt: bool, **variables: Any
    ) -> str:
        from headwater.data.modes.chat import render, template_tokens

        named = {key: special_token(self.folder, key) for key in ("bos_token", "eos_token")}
        tokens = template_tokens(self.tokenizer, self.ends[0])
        tokens |= {key: token for key, token in named.items() if token is not None}
        return render(template, messages, prompt=prompt, **tokens, **variables)


def check_unicode(text: str, where: str | None = None) -> None:
    """Check that a text is valid Unicode, which a tokenizer expects.

    Python reads an argument that is not UTF-8 as a text with half of a surrogate pair.

    Raises:
        DataError: if it is not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"expected text in UTF-8, found other bytes at character {error.start + 1}",
            where=where,
            remedy="write the text in UTF-8, and check the encoding of the terminal",
        ) from error


def open_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: tokenizer.json, or a folder with a tokenizer.

    Raises:
        ConfigError: if the tokenizers library is not installed.
        DataError: if the tokenizer is missing or damaged.
    """
    with importing("reading text", "data"):
        from headwater.data.tokenizer import load_tokenizer
    return load_tokenizer(path)


def mask_token_id(tokenizer: Tokenizer, folder: Path) -> int:
    """Return the id of the token that stands for a masked one.

    Args:
        tokenizer: the tokenizer.
        folder: folder with its other files.

    Raises:
        DataError: if the tokenizer has no mask token.
    """
    names = (special_token(folder, "mask_token"), "[MASK]", "<mask>")
    found = (tokenizer.token_to_id(name) for name in names if name is not None)
    token = next((token for token in found if token is not None), None)
    if token is None:
        raise DataError(
            "the tokenizer has no mask token",
            where=str(folder),
            remedy="name it as mask_token in tokenizer_config.json",
        )
    return int(token)


def open_codec(path: Path, end: int | str | None = None, known_ends: tuple[int, ...] = ()) -> Codec:
    """Load a tokenizer with its special tokens.

    Args:
        path: tokenizer.json, or a folder with a tokenizer.
        end: the end token or its id; found in the tokenizer's files if not given.
        known_ends: ids of end tokens that are known from elsewhere, used after those in the files.

    Raises:
        ConfigError: if the tokenizers library is not installed, or the id is negative.
        DataError: if the tokenizer is missing or damaged, or has no end token.
    """
    if isinstance(end, int) and end < 0:
        raise ConfigError(
            f"expected the id of a token, at least 0, got {end}",
            where="eos_id",
            remedy="leave it out: the end-of-text token is found in the tokenizer's files",
        )
    tokenizer = open_tokenizer(path)
    from headwater.data.tokenizer import end_of_text_id

    if isinstance(end, str):
        end = end_of_text_id(tokenizer, end)
    folder = path if path.is_dir() else path.parent
    named = {key: special_token(folder, key) for key in ("bos_token", "eos_token")}
    ids = {key: None if token is None else tokenizer.token_to_id(token) for key, token in named.items()}
    found = (end,) if end is not None else (ids["eos_token"], *end_tokens(folder), *known_ends)
    ends = tuple(dict.fromkeys(token for token in found if token is not None))
    ends = ends or (end_of_text_id(tokenizer),)
    return Codec(tokenizer, folder, ends, ends[0] if ids["bos_token"] is None else ids["bos_token"])
