"""Mode for captions and conversations about images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.core.units import counted
from headwater.data.modes.base import Context, Example, Tokens, Unusable, filled, renamed
from headwater.data.multimodal.conversations import VICUNA, Conversation, conversations, tokenized
from headwater.data.multimodal.layout import NO_IMAGE
from headwater.data.raw_records import Record

_BETWEEN_NAMES = "\0"


def image_texts(
    context: Context, records: Sequence[Record], _task: int
) -> Iterator[Example | DataError | Unusable]:
    """Yield an example for each caption or conversation.

    Its rows are the tokens of text, their loss mask, the position of each image, and the names of the image
    files. The loss is only on answers and captions (arXiv:2304.08485, section 4.2).
    """
    for record in records:
        try:
            fields = renamed(record, context.options).fields
            # All examples are made before the first yield, so an error in one caption leaves out the record.
            made = [_example(context, each) for each in conversations(fields, VICUNA, where=record.where)]
        except DataError as error:
            yield error
        else:
            yield from made


def _example(context: Context, conversation: Conversation) -> Example | Unusable:
    options, length = context.options, context.length
    if not any(part.learnt and part.text and part.text.strip() for part in conversation.parts):
        return Unusable("empty")
    _check_images(context, conversation)
    begin = None if options.begin_of_text is None else context.token(options.begin_of_text)
    tokens = tokenized(
        conversation,
        context.tokenizer,
        begin=begin,
        end=context.end,
        image_token=options.image_token_id,
        num_features=_num_features(context),
    )
    starts = np.array(tokens.starts, dtype=np.int32)
    last = int(starts.max(initial=-_num_features(context))) + _num_features(context)
    if last > length:
        raise DataError(
            f"an image ends at token {last}, but a sample has {length} tokens",
            where=conversation.where,
            remedy="use a larger sequence_length, or shorten the text before the image",
        )
    # One token more than a sample has positions: the last token is only a label.
    ids, learnt = (np.array(row[: length + 1], dtype=np.int32) for row in (tokens.ids, tokens.learnt))
    is_cut = len(ids) < len(tokens.ids)
    if is_cut and (options.longer == "skip" or not learnt[1:].any()):
        return Unusable("too_long")
    context.counts["cut"] += is_cut
    context.counts["images"] += len(starts)
    context.counts["text_bytes"] += sum(len((part.text or "").encode()) for part in conversation.parts)
    is_text = ~_in_images(starts, _num_features(context), len(ids))
    names = _BETWEEN_NAMES.join(conversation.images).encode("utf-8", errors="surrogateescape")
    return ids[is_text], learnt[is_text], starts, np.frombuffer(names, dtype=np.uint8).astype(np.int32)


def image_fields(example: Example, _number: int, context: Context) -> dict[str, Any]:
    """Return the fields of a sample of text with images; see `headwater.data.multimodal.files`."""
    text, text_learnt, starts, characters = example
    length, features, most = context.length, _num_features(context), context.options.num_images
    is_image = _in_images(starts, features, len(text) + len(starts) * features)
    ids = np.full(len(is_image), context.options.image_token_id, dtype=np.int32)
    learnt = np.zeros_like(ids)
    ids[~is_image], learnt[~is_image] = text, text_learnt
    channels = (
        (ids[:length], context.end),
        (learnt[1:], 0),
        (ids[1:], context.end),
        (np.zeros_like(ids[:length]), 1),
        (is_image[:length], 0),
    )
    names = characters.astype(np.uint8).tobytes().decode("utf-8", errors="surrogateescape")
    images = names.split(_BETWEEN_NAMES) if len(starts) else []
    places = np.full((most, features), length, dtype=np.int32)
    places[: len(starts)] = starts[:, None] + np.arange(features)
    return {
        "data": np.stack([filled(values, length, fill) for values, fill in channels]),
        "img_path": np.array([*images, *[NO_IMAGE] * (most - len(images))], dtype=object),
        "img_data_loc": places,
    }


def _in_images(starts: Tokens, num_features: int, length: int) -> npt.NDArray[np.bool_]:
    """Return a mask [length], True at the positions of the images that begin at `starts`."""
    inside = np.zeros(length, dtype=np.bool_)
    inside[starts[:, None] + np.arange(num_features)] = True
    return inside


def _num_features(context: Context) -> int:
    assert context.options.num_features is not None, "find_mode checks the needed options"
    return context.options.num_features


def _check_images(context: Context, conversation: Conversation) -> None:
    """Check that a conversation has at most `num_images` images, and that all files exist.

    Raises:
        DataError: if there are more images, or a file is missing.
    """
    folder, most = context.options.image_dir, context.options.num_images
    assert folder is not None, "find_mode checks the needed options"
    if len(conversation.images) > most:
        raise DataError(
            f"the sample has {counted(len(conversation.images), 'image', 'images')}, "
            f"but num_images is {most}",
            where=conversation.where,
            remedy="use a larger --num_images",
        )
    missing = next((name for name in conversation.images if not (folder / name).is_file()), None)
    if missing is not None:
        raise DataError(
            f"the image {missing} does not exist in {folder}",
            where=conversation.where,
            remedy="set --image_dir to the root folder of the images, or remove the record",
        )
