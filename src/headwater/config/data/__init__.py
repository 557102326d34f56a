"""What a data loader's section may say: one class for each kind of data, found by the processor's name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headwater.config.data.image import (
    ImageFolderDataConfig,
    LatentDataConfig,
    MNISTDataConfig,
    SegmentationDataConfig,
)
from headwater.config.data.multimodal import ImageTextDataConfig
from headwater.config.data.pairs import (
    SpanCorruptionDataConfig,
    TranslationDataConfig,
)
from headwater.config.data.text import (
    AnswerDataConfig,
    DynamicMaskDataConfig,
    GptDataConfig,
    MaskedTextDataConfig,
    PreferenceDataConfig,
    QuestionDataConfig,
    RetrievalDataConfig,
    SentencesDataConfig,
    TextClassificationDataConfig,
    TokenClassificationDataConfig,
)
from headwater.config.data.views import ViewDataConfig

DataConfig = (
    GptDataConfig
    | TextClassificationDataConfig
    | TokenClassificationDataConfig
    | QuestionDataConfig
    | MaskedTextDataConfig
    | DynamicMaskDataConfig
    | SentencesDataConfig
    | AnswerDataConfig
    | RetrievalDataConfig
    | PreferenceDataConfig
    | MNISTDataConfig
    | SpanCorruptionDataConfig
    | TranslationDataConfig
    | ImageFolderDataConfig
    | SegmentationDataConfig
    | ImageTextDataConfig
    | LatentDataConfig
    | ViewDataConfig
)
"""Any data loader's section."""

AnyData = Annotated[DataConfig, Field(discriminator="data_processor")]
"""The same as a key of a params file: the data processor's name says which."""

__all__ = [
    "AnswerDataConfig",
    "AnyData",
    "DataConfig",
    "DynamicMaskDataConfig",
    "GptDataConfig",
    "ImageFolderDataConfig",
    "ImageTextDataConfig",
    "LatentDataConfig",
    "MNISTDataConfig",
    "MaskedTextDataConfig",
    "PreferenceDataConfig",
    "QuestionDataConfig",
    "RetrievalDataConfig",
    "SegmentationDataConfig",
    "SentencesDataConfig",
    "SpanCorruptionDataConfig",
    "TextClassificationDataConfig",
    "TokenClassificationDataConfig",
    "TranslationDataConfig",
    "ViewDataConfig",
]
