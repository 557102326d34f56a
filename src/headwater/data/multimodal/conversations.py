"""Captions and conversations about images, turned into tokens and their loss mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.data.raw_records import checked_text

IMAGE_MARK = "<image>"
"""Text that marks the place of an image in a conversation."""

_ROLES = {"human": False, "user": False, "gpt": True, "assistant": True}
"""Role -> True if the labels in the turns of this role count in the loss."""


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """Format that writes a conversation as one text.

    Attributes:
        system: text before the first turn.
        question: text of a question; `{}` is replaced by the question.
        answer: text before an answer.
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
"""Format of Vicuna, the language model of LLaVA 1.5 (arXiv:2310.03744, section 3)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a conversation or caption: a text or an image.

    Attributes:
        text: the text; `None` for an image.
        learnt: True if its tokens count in the loss.
    """

    text: str | None
    learnt: bool = False


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The texts and images of a sample before tokenization.

    Attributes:
        images: paths of the images, relative to the folder of images.
        parts: texts and images in order.
        where: file and line, for error messages.
    """

    images: tuple[str, ...]
    parts: tuple[Part, ...]
    where: str


def conversations(record: Mapping[str, Any], chat: ChatFormat, *, where: str) -> Iterator[Conversation]:
    """Yield the samples of a record.

    A record may have `image`: a file name or a list of file names. It has either `captions`, a list of texts,
    or `conversations`, a list of turns `{"from": "human" or "gpt", "value": ...}`. Each caption becomes one
    sample: the images, then the caption. In turns, `IMAGE_MARK` stands for an image; without any mark all
    images come first.

    Args:
        record: the record.
        chat: format of conversations.
        where: file and line, for error messages.

    Raises:
        DataError: if the record has neither captions nor conversations, or the numbers of marks and images
            differ.
    """
    image = record.get("image")
    images = tuple(image) if isinstance(image, list) else () if image is None else (image,)
    if not all(isinstance(each, str) for each in images):
        raise _bad("expected a file name or a list of file names in image", where)
    if "captions" in record:
        for caption in _list(record, "captions", str, where):
            text = checked_text(caption, "captions", where)
            yield Conversation(images, (*[Part(None)] * len(images), Part(text, learnt=True)), where)
    elif "conversations" in record:
        turns = _list(record, "conversations", dict, where)
        parts = tuple(_parts(turns, chat, len(images), where))
        marks = sum(part.text is None for part in parts)
        if marks != len(images):
            raise _bad(f"expected {len(images)} marks {IMAGE_MARK}, one per image; got {marks}", where)
        yield Conversation(images, parts, where)
    else:
        raise _bad("the record has neither captions nor conversations", where)


def _parts(turns: list[dict[str, Any]], chat: ChatFormat, images: int, where: str) -> Iterator[Part]:
    texts = [turn.get("value") for turn in turns]
    if not all(isinstance(text, str) for text in texts) or not {turn.get("from") for turn in turns} <= set(
        _ROLES
    ):
        raise _bad(f"expected turns with `from` (one of {', '.join(_ROLES)}) and `value` (a text)", where)
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
        raise _bad(f"expected a list of {'texts' if kind is str else 'turns'} in {key}", where)
    return values


def _bad(what: str, where: str) -> DataError:
    return DataError(what, where=where, remedy="correct or remove the record")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a sample, and the places of its images.

    Attributes:
        ids: ids of the tokens.
        learnt: True for a token that counts in the loss.
        starts: position of the first token of each image.
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
    """Tokenize a sample.

    Args:
        conversation: the sample.
        tokenizer: tokenizer of the language model.
        begin: id of the first token of the sample; `None`: no such token.
        end: id of the token after each caption or answer.
        image_token: id of the token at the positions of images.
        num_features: positions that an image takes.
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
