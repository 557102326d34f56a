"""Data of texts for decoders and encoders."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect, Section
from headwater.config.data.common import Folders, LoaderSection

_AsPrepared = Annotated[Any, NoEffect("samples are read as they were prepared")]
_Buckets = Annotated[Any, NoEffect("all samples are filled up to one length")]


class SinkTokensConfig(Section):
    """Puts tokens before each sample that every later one may attend to.

    Attributes:
        name: of the change.
        sink_token_id: the token.
        num_sink_tokens: how often it is put there.
    """

    name: Literal["add_sink_tokens"]
    sink_token_id: int = Field(ge=0)
    num_sink_tokens: int = Field(ge=1)


class SourceConfig(Section):
    """One of the sources of a mixture.

    Attributes:
        data_dir: folders with HDF5 files.
        weight: share of the samples, relative to those of the other sources.
    """

    data_dir: Folders
    weight: float = Field(gt=0)


class GptDataConfig(LoaderSection):
    """Samples for next-word prediction in HDF5 files.

    Attributes:
        data_processor: the two spellings mean the same here.
        data_dir: folders with HDF5 files; those of the mixture where there is one.
        mixture: several sources, each with its weight, in place of `data_dir`.
        vocab_size: number above every token id; beside the model's.
        data_transforms: what is done to each sample.
        use_vsl: several texts in a sample, told apart by `attention_span` and `position_ids`; data that have
            these are read so in any case.
    """

    data_processor: Literal["GptHDF5DataProcessor", "GptHDF5MapDataProcessor"]
    data_dir: Folders
    mixture: Annotated[tuple[SourceConfig, ...], AsTuple] = ()
    vocab_size: Annotated[int | None, Field(ge=1)] = None
    data_transforms: Annotated[tuple[SinkTokensConfig, ...], AsTuple] = ()
    use_vsl: bool = False
    max_sequence_length: _AsPrepared = None
    num_examples: _AsPrepared = None

    @model_validator(mode="before")
    @classmethod
    def _folders_of_the_mixture(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("data_dir") is None and isinstance(data.get("mixture"), list):
            folders = [source.get("data_dir") for source in data["mixture"] if isinstance(source, dict)]
            every = [part for each in folders for part in (each if isinstance(each, list) else [each])]
            return data | ({"data_dir": every} if all(every) and every else {})
        return data

    @model_validator(mode="after")
    def _has_one_kind_of_source(self) -> GptDataConfig:
        mixed = tuple(folder for source in self.mixture for folder in source.data_dir)
        if mixed and mixed != self.data_dir:
            raise ValueError("write either data_dir or mixture, a list of data_dir and weight")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Where the samples come from; one source of weight 1 where there is no mixture."""
        return self.mixture or (SourceConfig(data_dir=self.data_dir, weight=1.0),)


class TextSection(LoaderSection):
    """What loaders of texts for BERT take.

    Attributes:
        data_dir: folder with the files.
        vocab_file: WordPiece tokens, one a line.
        max_sequence_length: tokens of a sample; longer texts are cut, shorter ones filled up.
        do_lower: lower case, without accents.
        is_training: the part to train on; otherwise that to evaluate on.
    """

    data_dir: FilePath
    vocab_file: FilePath
    max_sequence_length: int = Field(default=128, ge=3)
    do_lower: bool = True
    is_training: bool = True


class TextClassificationDataConfig(TextSection):
    """Texts with a class each, as the GLUE benchmark distributes them: `train.tsv` and `dev.tsv`."""

    data_processor: Literal["SST2DataProcessor", "MNLIDataProcessor"]


class TokenClassificationDataConfig(TextSection):
    """Tokens with a class each: a token, a tab and its tag a line, and an empty line after each text.

    Attributes:
        label_vocab_file: JSON, number of each tag; in order of the alphabet, `O` first, where absent.
    """

    data_processor: Literal["BertTokenClassifierDataProcessor"]
    label_vocab_file: FilePath | None = None


class QuestionDataConfig(TextSection):
    """Questions about texts that hold the answers, as SQuAD v1.1 distributes them: JSON, compressed or not.

    Attributes:
        data_dir: a file, or a folder of files.
        held_out_dir: likewise; in training, questions about texts that are in there are left out.
        max_query_length: tokens of a question; longer ones lose their end.
        doc_stride: tokens from the beginning of one window to that of the next, where a text is longer than a
            sample; at most those of a window.
    """

    data_processor: Literal["SquadDataProcessor"]
    held_out_dir: FilePath | None = None
    max_sequence_length: int = Field(default=384, ge=8)
    max_query_length: int = Field(default=64, ge=1)
    doc_stride: int = Field(default=128, ge=1)

    @model_validator(mode="after")
    def _room_for_context(self) -> QuestionDataConfig:
        if self.max_query_length + 4 > self.max_sequence_length:
            raise ValueError(
                f"max_query_length ({self.max_query_length}) leaves no room for a text in "
                f"max_sequence_length ({self.max_sequence_length})"
            )
        return self


class RecordSection(LoaderSection):
    """What loaders of samples with named fields take.

    Attributes:
        data_dir: folder of HDF5 or CSV files.
        max_sequence_length: tokens of a sample; longer ones are cut, shorter ones filled up. Those of the
            model where absent.
    """

    data_dir: FilePath
    max_sequence_length: int | None = Field(default=None, ge=3)


class MaskedTextDataConfig(RecordSection):
    """Texts with masked tokens, masked when they were prepared.

    Attributes:
        max_predictions_per_seq: tokens that are guessed at most; those of 15 % of the sample where absent.
        use_vsl: several texts in a sample, told apart by `attention_span` and `position_ids`.
    """

    data_processor: Literal["BertHDF5DataProcessor", "BertCSVDataProcessor"]
    max_predictions_per_seq: int | None = Field(default=None, ge=1)
    use_vsl: bool = False
    vocab_file: _AsPrepared = None
    do_lower: _AsPrepared = None
    masked_lm_prob: _AsPrepared = None
    vocab_size: Annotated[Any, NoEffect("the model's holds")] = None
    buckets: _Buckets = None


class DynamicMaskDataConfig(RecordSection):
    """Texts that are masked anew in each pass.

    Attributes:
        vocab_file: WordPiece tokens, one a line.
        max_predictions_per_seq: tokens that are guessed at most.
        masked_lm_prob: share of the tokens that are guessed.
        do_lower: the texts are lower case; they are cut into tokens already.
    """

    data_processor: Literal["BertCSVDynamicMaskDataProcessor"]
    vocab_file: FilePath
    max_predictions_per_seq: int = Field(default=20, ge=1)
    masked_lm_prob: float = Field(default=0.15, gt=0, lt=1)
    do_lower: Annotated[bool, NoEffect("the texts are cut into tokens already")] = True
    buckets: _Buckets = None


class SentencesDataConfig(RecordSection):
    """Texts of sentences, each with whether it belongs to the summary.

    Attributes:
        max_cls_tokens: sentences of a text at most.
    """

    data_processor: Literal["BertSumCSVDataProcessor"]
    max_cls_tokens: int = Field(default=50, ge=1)
    vocab_file: Annotated[Any, NoEffect("the texts are cut into tokens already")] = None
    do_lower: Annotated[bool, NoEffect("the texts are cut into tokens already")] = True


class AnswerDataConfig(RecordSection):
    """Questions with texts as tokens, and where the answer begins and ends in them."""

    data_processor: Literal["BertQADataProcessor"]
    vocab_file: Annotated[Any, NoEffect("the texts are cut into tokens already")] = None


class RetrievalDataConfig(RecordSection):
    """Questions with passages, of which the first answers the question.

    Attributes:
        num_passages: passages of a question, the right one included.
    """

    data_processor: Literal["DPRHDF5DataProcessor"]
    num_passages: int = Field(default=2, ge=1)


class PreferenceDataConfig(RecordSection):
    """Prompts, each with an answer that is preferred to another."""

    data_processor: Literal["DpoHDF5DataProcessor"]
