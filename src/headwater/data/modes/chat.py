"""Conversations: the two usual formats, and chat templates that turn them into text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError, DataError
from headwater.core.files import why_unreadable
from headwater.data.modes.base import find_field
from headwater.data.raw_records import Record, checked_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, str]
"""A message with the keys `role` and `content`."""

ASSISTANT = "assistant"

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Template for tokenizers that have none."""

_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT}


def conversation(record: Record) -> list[Message]:
    """Return the messages of a record.

    A record has `messages` with `role` and `content`, or `conversations` with `from` and `value`. A field
    `system` is added as the first message, unless the first message is already from the system.

    Raises:
        DataError: if the record has neither, or a message is malformed.
    """
    messages = messages_of(find_field(record, "messages", "conversations", "conversation"), record.where)
    system = record.fields.get("system")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": checked_text(system, "system", record.where)})
    return messages


def messages_of(value: Any, where: str) -> list[Message]:
    """Return the messages of a list of messages or of a single message.

    Args:
        value: messages with `role` and `content`, or with `from` and `value`.
        where: place of the record, for error messages.

    Raises:
        DataError: if a message is malformed.
    """
    found = []
    for number, message in enumerate([value] if isinstance(value, dict) else value, start=1):
        keys = next((keys for keys in (("role", "content"), ("from", "value")) if _has(message, keys)), None)
        if keys is None:
            there = ", ".join(map(repr, message)) if isinstance(message, dict) else type(message).__name__
            raise DataError(
                f"expected 'role' and 'content', or 'from' and 'value', in message {number}; got {there}",
                where=where,
                remedy="use the message format of OpenAI or ShareGPT",
            )
        role, content = (checked_text(message[key], key, where) for key in keys)
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found


def template_tokens(tokenizer: Tokenizer, end: int) -> dict[str, str]:
    """Return the special tokens that a template may refer to.

    Args:
        tokenizer: tokenizer with these tokens.
        end: id of the end-of-text token.
    """
    last = str(tokenizer.id_to_token(end))
    names = ("<s>", "<|begin_of_text|>", "<bos>")
    first = next((name for name in names if tokenizer.token_to_id(name) is not None), last)
    return {"eos_token": last, "bos_token": first}


def _has(message: Any, keys: tuple[str, str]) -> bool:
    return isinstance(message, dict) and all(key in message for key in keys)


def render(template: str, messages: list[Message], *, prompt: bool = False, **variables: Any) -> str:
    """Return the text that a chat template makes of a conversation.

    Args:
        template: Jinja template, in the format of the transformers library.
        messages: messages of the conversation.
        prompt: add the generation prompt, the text before an answer.
        variables: `bos_token` and others that the template may refer to. Without `strftime_now`, a template
            that asks for the date fails.

    Raises:
        DataError: if the template fails for these messages.
        ConfigError: if the template is not valid Jinja, or Jinja is not installed.
    """
    compiled = _compiled(template)
    try:
        return str(compiled.render(messages=messages, add_generation_prompt=prompt, **variables))
    except Exception as error:  # a template may fail in any way
        raise DataError(
            f"the chat template fails for this conversation: {error}",
            where="roles: " + ", ".join(message["role"] for message in messages),
            remedy="correct the record, or use another template (--chat_template)",
        ) from error


@functools.cache
def _compiled(template: str) -> Any:
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise ConfigError("chat templates need jinja2", remedy="pip install 'headwater[chat]'") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_extension()]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _no_clock
    # Jinja's own filter escapes HTML characters, which templates do not expect.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: {error}",
            where="--chat_template",
            remedy="correct the template",
        ) from error


def _generation_extension() -> type:
    """Return a Jinja extension that accepts the tag `generation`, which templates put around answers.

    The tag has no effect here.
    """
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _refuse(message: str) -> None:
    raise ValueError(message)


def _no_clock(_format: str) -> str:
    raise ValueError("the chat template uses strftime_now, which would make the data depend on the date")


def find_template(tokenizer: Path | None) -> str | None:
    """Return the chat template in a tokenizer's folder; `None` if the folder lacks one.

    It is `chat_template.jinja`, or else the `chat_template` in `tokenizer_config.json`.

    Raises:
        DataError: if `tokenizer_config.json` is damaged.
    """
    if tokenizer is None:
        return None
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(found, list):  # several templates, each with a name
            found = next((each["template"] for each in found if each["name"] == "default"), None)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"the chat template cannot be read: {why_unreadable(error)}",
            where=str(config),
            remedy="copy the file again, or name a template with --chat_template",
        ) from error
    return found if isinstance(found, str) else None
