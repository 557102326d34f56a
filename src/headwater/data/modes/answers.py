"""Modes with the loss only on an answer: completions of prompts, summaries, turns of an assistant."""

from __future__ import annotations

import numpy as np

from headwater.core.errors import DataError
from headwater.data.modes.base import Context, Example, Tokens, Unusable, find_field, find_text, renamed
from headwater.data.modes.chat import (
    ASSISTANT,
    PLAIN_TEMPLATE,
    Message,
    conversation,
    render,
    template_tokens,
)
from headwater.data.raw_records import Record, checked_text

_PROMPTS = ("prompt", "instruction", "question")
_ANSWERS = ("completion", "response", "output", "answer")
_DOCUMENTS = ("document", "article", "dialogue", "source", "text")
_SUMMARIES = ("summary", "highlights", "target")
_SEPARATOR = "\n\nTL;DR: "


def prompt_completion(context: Context, record: Record) -> Example:
    """Return an example of a prompt and its completion.

    `instruction` and `input` are joined to a prompt with an empty line between them. If the example is too
    long, the beginning of the prompt is cut.
    """
    record = renamed(record, context.options)
    prompt, answer = prompt_text(record, context.options.separator), find_text(record, *_ANSWERS)
    if not answer.strip():
        raise Unusable("empty")
    prompt_tokens, answer_tokens = context.encode(prompt), context.ended(context.encode(answer))
    excess = len(prompt_tokens) + len(answer_tokens) - (context.length + 1)
    return with_answer(shortened(context, prompt_tokens, excess, keep_end=True), answer_tokens)


def summarization(context: Context, record: Record) -> Example:
    """Return an example of a document, the separator and its summary.

    If the example is too long, the end of the document is cut.
    """
    record = renamed(record, context.options)
    document, summary = _joined(record, *_DOCUMENTS), _first(record, *_SUMMARIES)
    separator = _SEPARATOR if context.options.separator is None else context.options.separator
    if not document.strip() or not summary.strip():
        raise Unusable("empty")
    tokens, between = context.encode(document.strip()), context.encode(separator)
    answer = context.ended(context.encode(summary.strip()))
    excess = len(tokens) + len(between) + len(answer) - (context.length + 1)
    tokens = shortened(context, tokens, excess, keep_end=False)
    return with_answer(np.concatenate([tokens, between]), answer)


def chat(context: Context, record: Record) -> Example:
    """Return an example of a conversation, with the loss on the turns of the assistant.

    If the conversation is too long, its end is cut.
    """
    messages = conversation(renamed(record, context.options))
    # No token after the last answer counts in the loss, so later turns would only take space.
    while messages and messages[-1]["role"] != ASSISTANT:
        messages.pop()
    if not any(message["role"] == ASSISTANT and message["content"].strip() for message in messages):
        raise Unusable("empty")
    text, spans = _answers(context, messages, record.where)
    context.counts["text_bytes"] += len(text.encode())
    encoding = context.tokenizer.encode(text, add_special_tokens=False)
    tokens = np.array(encoding.ids, dtype=np.int32)
    starts = np.array([start for start, _ in encoding.offsets])
    mask = np.zeros_like(tokens)
    for start, stop in spans:
        mask |= ((starts >= start) & (starts < stop)).astype(np.int32)
    room = context.length + 1
    if len(tokens) > room:
        if context.options.longer == "skip" or not mask[1:room].any():
            raise Unusable("too_long")
        context.counts["cut"] += 1
    return tokens[:room], mask[:room]


def _answers(context: Context, messages: list[Message], where: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the spans [start, stop) of characters of the assistant's turns.

    To find a turn, the template is applied twice: to the messages before the turn, with the generation
    prompt, and to the messages up to and including the turn. The turn is the difference of the two texts.
    """
    text, spans = chat_text(context, messages), []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before = chat_text(context, messages[:number], prompt=True)
            after = chat_text(context, messages[: number + 1])
            if not text.startswith(before):
                # Some templates strip the space between the generation prompt and an answer.
                before = before.rstrip()
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    "the chat template changes the text of a turn when more turns follow",
                    where=f"{where}, message {number + 1}",
                    remedy="use another template (--chat_template)",
                )
            spans.append((len(before), len(after)))
    return text, spans


def chat_text(context: Context, messages: list[Message], *, prompt: bool = False) -> str:
    """Return the text of a conversation.

    Args:
        context: context with the chat template and the tokenizer.
        messages: messages of the conversation.
        prompt: add the generation prompt, the text before an answer.

    Raises:
        DataError: if the template fails for these messages.
        ConfigError: if the template is not valid Jinja, or Jinja is not installed.
    """
    template = context.options.chat_template or PLAIN_TEMPLATE
    return render(template, messages, prompt=prompt, **template_tokens(context.tokenizer, context.end))


def prompt_text(record: Record, separator: str | None) -> str:
    """Return the text before the answer: the record's prompt and then the separator."""
    prompt = find_text(record, *_PROMPTS)
    if "instruction" in record.fields:
        more = record.fields.get("input")
        prompt = f"{prompt}\n\n{checked_text(more, 'input', record.where)}" if more else prompt
        separator = "\n\n" if separator is None else separator
    return prompt + (separator or "")


def _joined(record: Record, *names: str) -> str:
    """Return the text of a field; a list of sentences is joined with spaces."""
    value = find_field(record, *names)
    if isinstance(value, list):
        value = " ".join(checked_text(part, names[0], record.where) for part in value)
    return checked_text(value, names[0], record.where)


def _first(record: Record, *names: str) -> str:
    """Return the text of a field, or the first text if it is a list of alternatives."""
    value = find_field(record, *names)
    if isinstance(value, list):
        if not value:
            raise Unusable("empty")
        value = value[0]
    return checked_text(value, names[0], record.where)


def shortened(context: Context, tokens: Tokens, excess: int, *, keep_end: bool) -> Tokens:
    """Return `tokens` without `excess` of them at one end, and count the record as cut.

    Args:
        context: decides if records may be cut.
        tokens: tokens to shorten.
        excess: number of tokens to cut; 0 or less: none.
        keep_end: cut at the beginning instead of at the end.

    Raises:
        Unusable: if no token would be left, or records may not be cut.
    """
    if excess <= 0:
        return tokens
    if context.options.longer == "skip" or excess >= len(tokens):
        raise Unusable("too_long")
    context.counts["cut"] += 1
    return tokens[excess:] if keep_end else tokens[:-excess]


def with_answer(prompt: Tokens, answer: Tokens) -> Example:
    """Return an example of a prompt and an answer: the tokens, and the loss mask (1 on the answer)."""
    tokens = np.concatenate([prompt, answer])
    return tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.int32)
