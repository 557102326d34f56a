"""From captions and conversations about images to tokens, with what is to be learnt of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.data.raw_records import checked_text

IMAGE_MARK = "<image>"
"""Stands in a conversation where an image is."""

_ROLES = {"human": False, "user": False, "gpt": True, "assistant": True}
"""Who speaks, and whether it is what the model learns to say."""


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written as one text.

    Attributes:
        system: what comes first.
        question: what stands around a question, in place of `{}`.
        answer: what comes before an answer.
    """

    system: str
    question: str
    answer: str


VICUNA = ChatFormat(
    system=(
        "A chat between a curious human and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the human's questions. "
    ),
    question="USER: {} ",
    answer="ASSISTANT: ",
)
"""The format of the language model that LLaVA 1.5 starts from (arXiv:2310.03744, section 3)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a sample.

    Attributes:
        text: its text; `None` where it is an image.
        learnt: whether the model learns to say it.
    """

    text: str | None
    learnt: bool = False


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A sample before it is cut to a length.

    Attributes:
        images: where they are, below the folder of images.
        parts: texts and images in order.
        where: file and line, for messages.
    """

    images: tuple[str, ...]
    parts: tuple[Part, ...]
    where: str


def conversations(record: Mapping[str, Any], chat: ChatFormat, *, where: str) -> Iterator[Conversation]:
    """The samples of a record.

    Args:
        record: `image`: a file or a list of them, or none; and either `captions`, a sample each: the images,
            then the caption; or `conversations`: turns `{"from": "human" or "gpt", "value": ...}` with
            `IMAGE_MARK` where an image is, at the beginning where there is no mark.
        chat: how conversations are written.
        where: file and line, for messages.

    Raises:
        DataError: if the record has neither, or the marks are not as many as the images.
    """
    image = record.get("image")
    images = tuple(image) if isinstance(image, list) else () if image is None else (image,)
    if not all(isinstance(each, str) for each in images):
        raise _bad("image is no file name", where)
    if "captions" in record:
        for caption in _list(record, "captions", str, where):
            text = checked_text(caption, "captions", where)
            yield Conversation(images, (*[Part(None)] * len(images), Part(text, learnt=True)), where)
    elif "conversations" in record:
        turns = _list(record, "conversations", dict, where)
        parts = tuple(_parts(turns, chat, len(images), where))
        marks = sum(part.text is None for part in parts)
        if marks != len(images):
            raise _bad(f"there are {marks} marks {IMAGE_MARK} and {len(images)} images", where)
        yield Conversation(images, parts, where)
    else:
        raise _bad("there are neither captions nor conversations", where)


def _parts(turns: list[dict[str, Any]], chat: ChatFormat, images: int, where: str) -> Iterator[Part]:
    texts = [turn.get("value") for turn in turns]
    if not all(isinstance(text, str) for text in texts) or not {turn.get("from") for turn in turns} <= set(
        _ROLES
    ):
        raise _bad(f"a turn needs `from`, one of {', '.join(_ROLES)}, and `value`, a text", where)
    if images and not any(IMAGE_MARK in str(text) for text in texts):
        texts[0] = "\n".join([IMAGE_MARK] * images + [str(texts[0])])
    yield Part(chat.system)
    for turn, value in zip(turns, texts, strict=True):
        text = checked_text(value, "value", where)
        if _ROLES[turn["from"]]:
            yield Part(chat.answer)
            yield Part(text, learnt=True)
            continue
        for number, piece in enumerate(chat.question.format(text).split(IMAGE_MARK)):
            if number:
                yield Part(None)
            if piece:
                yield Part(piece)


def _list(record: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    values = record[key]
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        raise _bad(f"{key} is no list of {'texts' if kind is str else 'turns'}", where)
    return values


def _bad(what: str, where: str) -> DataError:
    return DataError(what, where=where, remedy="correct or remove the record")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A sample as tokens.

    Attributes:
        ids: the tokens.
        learnt: which of them the model learns to say.
        starts: where each image begins.
    """

    ids: list[int]
    learnt: list[bool]
    starts: list[int]


def tokenized(
    conversation: Conversation,
    tokenizer: Tokenizer,
    *,
    begin: int | None,
    end: int,
    image_token: int,
    num_features: int,
) -> Tokens:
    """The tokens of a sample.

    Args:
        conversation: the sample.
        tokenizer: of the language model.
        begin: token that comes first, if there is one.
        end: token that ends what the model learns to say.
        image_token: token in the places of images.
        num_features: places that an image takes.
    """
    ids = [] if begin is None else [begin]
    learnt, starts = [False] * len(ids), []
    for part in conversation.parts:
        if part.text is None:
            starts.append(len(ids))
            more = [image_token] * num_features
        else:
            more = tokenizer.encode(part.text, add_special_tokens=False).ids + ([end] if part.learnt else [])
        ids += more
        learnt += [part.learnt] * len(more)
    return Tokens(ids, learnt, starts)
