"""Captions and conversations about images to HDF5."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.data.multimodal.conversations import VICUNA, ChatFormat, Conversation, conversations, tokenized
from headwater.data.multimodal.files import ImageText, Numbers, written_file
from headwater.data.raw_records import BadRecords, Record
from headwater.data.tokenizer import end_of_text_id


@dataclasses.dataclass(frozen=True)
class ImageTextSettings:
    """What samples look like.

    Attributes:
        sequence_length: tokens of a sample, those of images included; longer ones are cut, shorter ones
            filled up.
        num_features: places that an image takes: `num_features` of the model.
        num_images: images of a sample at most.
        image_token_id: token in the places of images, as in the model's section.
        begin: token that each sample begins with, if any does.
        end: token that ends what the model learns to say; by default the one the tokenizer has.
        chat: how conversations are written.
    """

    sequence_length: int
    num_features: int
    num_images: int = 1
    image_token_id: int = 0
    begin: str | None = None
    end: str | None = None
    chat: ChatFormat = VICUNA


@dataclasses.dataclass
class ImageTextStatistics:
    """What was written.

    Attributes:
        samples: samples.
        images: images in them, each as often as it occurs.
        tokens: tokens of text.
        learnt_tokens: those that count in the loss.
        cut_samples: samples that were longer than the model reads.
    """

    samples: int = 0
    images: int = 0
    tokens: int = 0
    learnt_tokens: int = 0
    cut_samples: int = 0


def prepare_image_texts(
    records: Iterable[Record],
    output: Path,
    *,
    tokenizer: Tokenizer,
    image_dir: Path,
    settings: ImageTextSettings,
    bad: BadRecords | None = None,
) -> ImageTextStatistics:
    """Write an HDF5 file of texts with images; it appears when it is complete.

    Only answers and captions are learnt (arXiv:2304.08485, section 4.2). The same records give the same
    samples in the same order.

    Args:
        records: see `headwater.data.multimodal.conversations.conversations`.
        output: the file, `.h5`.
        tokenizer: of the language model.
        image_dir: folder below which the images are.
        settings: what samples look like.
        bad: what becomes of records that cannot be used; the first is an error if not given.

    Raises:
        DataError: for a record or an image that cannot be used, or if there are none.
    """
    bad = bad or BadRecords()
    preparation = _Preparation(tokenizer, image_dir, settings)
    with written_file(
        output,
        sequence_length=settings.sequence_length,
        num_images=settings.num_images,
        num_features=settings.num_features,
    ) as writer:
        for record in records:
            try:
                for conversation in conversations(record.fields, settings.chat, where=record.where):
                    writer.add(preparation.sample(conversation))
            except DataError as error:
                bad.add(error)
        if not preparation.statistics.samples:
            raise DataError("there are no records", where=str(output), remedy="name files that are not empty")
    return preparation.statistics


class _Preparation:
    """Makes samples and counts them."""

    def __init__(self, tokenizer: Tokenizer, image_dir: Path, settings: ImageTextSettings) -> None:
        self.tokenizer, self.image_dir, self.settings = tokenizer, image_dir, settings
        self.statistics = ImageTextStatistics()
        self._begin = None if settings.begin is None else end_of_text_id(tokenizer, settings.begin)
        self._end = end_of_text_id(tokenizer, settings.end)

    def sample(self, conversation: Conversation) -> ImageText:
        """The sample as it is stored.

        Raises:
            DataError: if an image is missing, or the images do not fit.
        """
        settings = self.settings
        self._check_images(conversation)
        tokens = tokenized(
            conversation,
            self.tokenizer,
            begin=self._begin,
            end=self._end,
            image_token=settings.image_token_id,
            num_features=settings.num_features,
        )
        last = max((start + settings.num_features for start in tokens.starts), default=0)
        if last > settings.sequence_length:
            raise DataError(
                f"an image ends at token {last}, and a sample has {settings.sequence_length}",
                where=conversation.where,
                remedy="use a larger sequence_length, or shorten the text before the image",
            )
        data, places = self._arrays(tokens.ids, tokens.learnt, tokens.starts)
        self.statistics.samples += 1
        self.statistics.images += len(tokens.starts)
        self.statistics.tokens += len(tokens.ids) - len(tokens.starts) * settings.num_features
        self.statistics.learnt_tokens += int(data[1].sum())
        self.statistics.cut_samples += len(tokens.ids) > settings.sequence_length + 1
        absent = (None,) * (settings.num_images - len(conversation.images))
        return ImageText(data, (*conversation.images, *absent), places)

    def _arrays(self, ids: list[int], learnt: list[bool], starts: list[int]) -> tuple[Numbers, Numbers]:
        """All channels, and the places of the images."""
        length, features = self.settings.sequence_length, self.settings.num_features
        places = np.full((self.settings.num_images, features), length, dtype=np.int32)
        images = np.zeros(length, dtype=np.int32)
        for number, start in enumerate(starts):
            places[number] = start + np.arange(features)
            images[places[number]] = 1
        tokens, labels = (np.full(length, self._end, dtype=np.int32) for _ in range(2))
        mask, padding = np.zeros(length, dtype=np.int32), np.ones(length, dtype=np.int32)
        given, next_given = ids[:length], ids[1 : length + 1]
        tokens[: len(given)], labels[: len(next_given)] = given, next_given
        mask[: len(next_given)], padding[: len(given)] = learnt[1 : length + 1], 0
        return np.stack([tokens, mask, labels, padding, images]), places

    def _check_images(self, conversation: Conversation) -> None:
        images, most = len(conversation.images), self.settings.num_images
        if images > most:
            raise DataError(
                f"the sample has {images} images, and num_images is {most}",
                where=conversation.where,
                remedy="use a larger num_images",
            )
        missing = next((name for name in conversation.images if not (self.image_dir / name).is_file()), None)
        if missing is not None:
            raise DataError(
                f"the image {missing} is not below {self.image_dir}",
                where=conversation.where,
                remedy="name the folder below which the images are, or remove the record",
            )
