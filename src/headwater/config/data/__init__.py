"""The schema of data loaders: a class for each kind of data, selected by the name of the data processor."""

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
"""The type of a data loader in a params file. `data_processor` selects the class."""

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
