"""Modes for texts that are compared: a chosen and a rejected answer, or a question and passages."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.core.batches import IGNORED
from headwater.core.errors import DataError
from headwater.data.modes.answers import chat_text, prompt_text, shortened
from headwater.data.modes.base import (
    Context,
    Example,
    Tokens,
    Unusable,
    filled,
    find_field,
    find_text,
    renamed,
)
from headwater.data.modes.chat import Message, conversation, messages_of
from headwater.data.passages import ended, first_tokens, titled
from headwater.data.raw_records import Record, checked_text

Fields = dict[str, Tokens]

_QUESTIONS = ("question", "query", "anchor")
_POSITIVES = ("positive", "positive_passage", "positive_ctxs", "passage", "context")
_NEGATIVES = ("hard_negatives", "negatives", "hard_negative_ctxs", "negative", "negative_ctxs")


def preference(context: Context, record: Record) -> Example:
    """Return an example with the tokens of a prompt, of the chosen and of the rejected answer.

    Answers are texts, messages, or whole conversations that begin with the prompt. If the example is too
    long, the beginning of the prompt is cut.
    """
    record = renamed(record, context.options)
    chosen, rejected = (find_field(record, name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str):
        prompt = prompt_text(record, context.options.separator)
        answers = [find_text(record, name) for name in ("chosen", "rejected")]
        if not all(answer.strip() for answer in answers):
            raise Unusable("empty")
        ends = [context.ended(context.encode(answer)) for answer in answers]
    else:
        prompt, answers = _of_messages(context, record, chosen, rejected)
        ends = [context.encode(answer) for answer in answers]
        if not all(len(end) for end in ends):
            raise Unusable("empty")
    tokens = context.encode(prompt)
    if not len(tokens):
        raise Unusable("empty")
    # The limit is not `length + 1` as in other modes: these labels are not shifted, so every token takes a
    # position.
    excess = len(tokens) + max(map(len, ends)) - context.length
    return shortened(context, tokens, excess, keep_end=True), *ends


def _of_messages(context: Context, record: Record, chosen: Any, rejected: Any) -> tuple[str, list[str]]:
    """Return the text of the prompt, and of both answers, of a record with messages."""
    before = _messages_before(record)
    sides = [messages_of(side, record.where) for side in (chosen, rejected)]
    for number, side in enumerate(sides):
        if not side:
            raise Unusable("empty")
        # Several messages are the whole conversation; a single message is only the answer.
        sides[number] = side if len(side) > 1 else before + side
    prompts = [chat_text(context, side[:-1], prompt=True) for side in sides]
    if prompts[0] != prompts[1] or len(sides[0]) < 2:
        raise DataError(
            "chosen and rejected do not answer the same conversation",
            where=record.where,
            remedy="begin both with the same messages, or put these into prompt or conversations",
        )
    texts = [chat_text(context, side) for side in sides]
    # Some templates strip the space between the generation prompt and an answer.
    prompt = prompts[0] if all(text.startswith(prompts[0]) for text in texts) else prompts[0].rstrip()
    return prompt, [text[len(prompt) :] for text in texts]


def _messages_before(record: Record) -> list[Message]:
    prompt = record.fields.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        return messages_of(prompt, record.where)
    has = any(record.fields.get(name) for name in ("messages", "conversations", "conversation"))
    return conversation(record) if has else []


def preference_fields(example: Example, _number: int, context: Context) -> Fields:
    """Return the fields of a sample for DPO: tokens, mask and labels of the prompt with each answer."""
    prompt, *answers = example
    fields = {}
    for side, answer in zip(("chosen", "rejected"), answers, strict=True):
        tokens = np.concatenate([prompt, answer])
        labels = np.where(np.arange(len(tokens)) < len(prompt), IGNORED, tokens)
        fields[f"{side}_input_ids"] = filled(tokens, context.length, context.pad)
        fields[f"{side}_attention_mask"] = filled(np.ones_like(tokens), context.length, 0)
        fields[f"{side}_labels"] = filled(labels, context.length, IGNORED)
    return fields


def embedding_pairs(context: Context, record: Record) -> Example:
    """Return an example with the tokens of a question, of a passage that answers it, and of hard negatives.

    Passages are texts, or objects with `text` and an optional `title`. A text that is too long is cut at its
    end.
    """
    record = renamed(record, context.options)
    question = find_text(record, *_QUESTIONS)
    positives = _passages(find_field(record, *_POSITIVES), record)
    wanted = context.options.num_passages - 1
    negatives = _passages(find_field(record, *_NEGATIVES), record) if wanted else []
    if len(negatives) < wanted:
        raise DataError(
            f"expected {wanted} hard negatives, got {len(negatives)}",
            where=record.where,
            remedy=f"use --num_passages {len(negatives) + 1}, or skip the record with --skip_bad_records",
        )
    if not question.strip() or not positives or not "".join(positives[0]).strip():
        raise Unusable("empty")
    texts = [("", question), positives[0], *negatives[:wanted]]
    return tuple(_enclosed(context, title, text) for title, text in texts)


def _passages(value: Any, record: Record) -> list[tuple[str, str]]:
    """Return title and text of each passage; the title may be empty."""
    found = []
    for part in value if isinstance(value, list) else [value]:
        is_titled = isinstance(part, dict)
        both = [str(part.get(key) or "") for key in ("title", "text")] if is_titled else ["", part]
        title, text = (checked_text(each, "passage", record.where) for each in both)
        found.append((title, text))
    return found


def _enclosed(context: Context, title: str, text: str) -> Tokens:
    """Return the tokens of a text with the special tokens of the tokenizer, and end-of-text as the last."""
    context.counts["text_bytes"] += len(title.encode()) + len(text.encode())
    whole = titled(context.tokenizer, title, text, context.length)
    tokens = ended(context.tokenizer.encode_batch_fast([whole])[0].ids, context.end)
    if len(tokens) > context.length:
        context.counts["cut"] += 1
    return np.array(first_tokens(tokens, context.length), dtype=np.int32)


def embedding_fields(example: Example, _number: int, context: Context) -> Fields:
    """Return the fields of a sample for DPR: question and passages; all token types are 0."""
    rows = {
        "input_ids": [filled(tokens, context.length, context.pad) for tokens in example],
        "attention_mask": [filled(np.ones_like(tokens), context.length, 0) for tokens in example],
        "token_type_ids": [np.zeros(context.length, dtype=np.int32) for _ in example],
    }
    fields = {}
    for name, (question, *passages) in rows.items():
        fields[f"questions_{name}"], fields[f"ctx_{name}"] = question, np.stack(passages)
    return fields
