"""Conversations: their two usual shapes, and the text that a template makes of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError, DataError
from headwater.data.modes.base import find_field
from headwater.data.raw_records import Record, checked_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = dict[str, str]
"""`role` and `content`."""

ASSISTANT = "assistant"

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "### {{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""For tokenizers without a template of their own."""

_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT}


def conversation(record: Record) -> list[Message]:
    """The messages of a record: `messages` of `role` and `content`, or `conversations` of `from` and `value`.

    A field `system` is a first message where there is none from the system.

    Raises:
        DataError: if it has neither, or one is not of this form.
    """
    messages = messages_of(find_field(record, "messages", "conversations", "conversation"), record.where)
    system = record.fields.get("system")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": checked_text(system, "system", record.where)})
    return messages


def messages_of(value: Any, where: str) -> list[Message]:
    """The same of the list alone, or of a single message."""
    found = []
    for number, message in enumerate([value] if isinstance(value, dict) else value, start=1):
        keys = next((keys for keys in (("role", "content"), ("from", "value")) if _has(message, keys)), None)
        if keys is None:
            there = ", ".join(map(repr, message)) if isinstance(message, dict) else type(message).__name__
            raise DataError(
                f"message {number} has neither 'role' and 'content' nor 'from' and 'value', but {there}",
                where=where,
                remedy="write messages as OpenAI or ShareGPT write them",
            )
        role, content = (checked_text(message[key], key, where) for key in keys)
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found


def template_tokens(tokenizer: Tokenizer, end: int) -> dict[str, str]:
    """Return the special tokens that a template may name.

    Args:
        tokenizer: has them.
        end: id of the token that ends a text.
    """
    last = str(tokenizer.id_to_token(end))
    names = ("<s>", "<|begin_of_text|>", "<bos>")
    first = next((name for name in names if tokenizer.token_to_id(name) is not None), last)
    return {"eos_token": last, "bos_token": first}


def _has(message: Any, keys: tuple[str, str]) -> bool:
    return isinstance(message, dict) and all(key in message for key in keys)


def render(template: str, messages: list[Message], *, prompt: bool = False, **tokens: str) -> str:
    """The text of a conversation.

    Args:
        template: Jinja, as transformers' tokenizers have it.
        messages: of the conversation.
        prompt: add what comes before an answer.
        tokens: `bos_token` and others that the template may name.

    Raises:
        DataError: if the template does not take these messages.
        ConfigError: if it is not Jinja, or Jinja is not installed.
    """
    compiled = _compiled(template)
    try:
        return str(compiled.render(messages=messages, add_generation_prompt=prompt, **tokens))
    except Exception as error:  # a template may fail in any way
        raise DataError(
            f"the chat template does not take this conversation: {error}",
            where=", ".join(message["role"] for message in messages),
            remedy="correct the record, or name another template with --chat_template",
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
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not Jinja: {error}", where="--chat_template", remedy="correct it"
        ) from error


def _generation_extension() -> type:
    """The tag `generation`, which transformers puts around answers; here it changes nothing."""
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
    raise ValueError("the template asks for the date, and the same data must come out every day")


def find_template(tokenizer: Path | None) -> str | None:
    """The chat template beside a tokenizer: `chat_template.jinja`, or that in `tokenizer_config.json`."""
    if tokenizer is None:
        return None
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):  # several templates, each with a name
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    return found if isinstance(found, str) else None
