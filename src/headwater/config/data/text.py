"""The schema of text data for decoders and encoders."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect, Section
from headwater.config.data.common import Folders, FromModel, LoaderSection, OnePaddedLength

_AsPrepared = Annotated[Any, NoEffect("it was applied when the samples were prepared")]
_Tokenized = NoEffect("the texts are already tokenized")


class SinkTokensConfig(Section):
    """Sink tokens, which are inserted before each sample and which all later tokens can attend to.

    Attributes:
        name: name of the transform.
        sink_token_id: id of the token.
        num_sink_tokens: number of copies to insert.
    """

    name: Literal["add_sink_tokens"]
    sink_token_id: int = Field(ge=0)
    num_sink_tokens: int = Field(ge=1)


class SourceConfig(Section):
    """A source of a mixture.

    Attributes:
        data_dir: folders with HDF5 files.
        weight: weight of the source: its fraction of the samples relative to the other sources.
    """

    data_dir: Folders
    weight: float = Field(gt=0)


class GptDataConfig(LoaderSection):
    """Samples for next-word prediction in HDF5 files.

    Attributes:
        data_processor: both names have the same meaning.
        data_dir: folders with HDF5 files; those of the mixture if there is one.
        mixture: several sources with weights, instead of `data_dir`.
        vocab_size: number of token ids; must be that of the model.
        data_transforms: transforms of each sample.
        use_vsl: require samples that hold several texts, separated by `attention_span` and `position_ids`.
            If the data have these fields, they are used even without this key.
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
            # If a source lacks its data_dir, the schema names this source.
            return data | ({"data_dir": every} if all(every) and every else {})
        return data

    @model_validator(mode="after")
    def _has_one_kind_of_source(self) -> GptDataConfig:
        mixed = tuple(folder for source in self.mixture for folder in source.data_dir)
        if mixed and mixed != self.data_dir:
            raise ValueError("expected data_dir or mixture, a list of data_dir and weight, found both")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources of the samples; without a mixture, a single source with weight 1."""
        return self.mixture or (SourceConfig(data_dir=self.data_dir, weight=1.0),)


class TextSection(LoaderSection):
    """The keys of loaders of texts for BERT.

    Attributes:
        data_dir: folder with the files.
        vocab_file: file with a WordPiece token on each line.
        max_sequence_length: tokens of a sample; longer texts are truncated, shorter ones padded.
        do_lower: convert texts to lower case and remove accents.
        is_training: true for the training data, false for the evaluation data.
    """

    data_dir: FilePath
    vocab_file: FilePath
    max_sequence_length: int = Field(default=128, ge=3)
    do_lower: bool = True
    is_training: bool = True


class TextClassificationDataConfig(TextSection):
    """Texts with classes in the files of the GLUE benchmark: `train.tsv` and `dev.tsv`."""

    data_processor: Literal["SST2DataProcessor", "MNLIDataProcessor"]


class TokenClassificationDataConfig(TextSection):
    """Tokens with classes: each line has a token, a tab and its tag; an empty line follows each text.

    Attributes:
        label_vocab_file: JSON file with the number of each tag; if absent, `O` is first and the others follow
            in alphabetical order.
    """

    data_processor: Literal["BertTokenClassifierDataProcessor"]
    label_vocab_file: FilePath | None = None


class QuestionDataConfig(TextSection):
    """Questions with texts that contain the answers, in the JSON files of SQuAD v1.1, compressed or not.

    Attributes:
        data_dir: a file, or a folder of files.
        held_out_dir: a file, or a folder of files. Questions about texts in it are skipped in training.
        max_query_length: largest number of tokens of a question; longer ones are truncated at the end.
        doc_stride: tokens between the starts of consecutive windows of a text that is longer than a sample;
            at most the length of a window.
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
                f"expected max_query_length <= max_sequence_length - 4, found {self.max_query_length} and "
                f"{self.max_sequence_length}"
            )
        return self


class RecordSection(LoaderSection):
    """The keys of loaders of samples with named fields.

    Attributes:
        data_dir: folder of HDF5 or CSV files.
        max_sequence_length: tokens of a sample; longer ones are truncated, shorter ones padded. The model's
            length if absent.
    """

    data_dir: FilePath
    max_sequence_length: int | None = Field(default=None, ge=3)


class MaskedTextDataConfig(RecordSection):
    """Texts with tokens that were masked when the data were prepared.

    Attributes:
        max_predictions_per_seq: largest number of tokens to predict; 15 % of the sample if absent.
        use_vsl: require samples that hold several texts, separated by `attention_span` and `position_ids`.
    """

    data_processor: Literal["BertHDF5DataProcessor", "BertCSVDataProcessor"]
    max_predictions_per_seq: int | None = Field(default=None, ge=1)
    use_vsl: bool = False
    vocab_file: _AsPrepared = None
    do_lower: _AsPrepared = None
    masked_lm_prob: _AsPrepared = None
    vocab_size: FromModel = None
    buckets: OnePaddedLength = None


class DynamicMaskDataConfig(RecordSection):
    """Texts in which other random tokens are masked in each pass.

    Attributes:
        vocab_file: file with a WordPiece token on each line.
        max_predictions_per_seq: largest number of tokens to predict.
        masked_lm_prob: fraction of the tokens to predict.
    """

    data_processor: Literal["BertCSVDynamicMaskDataProcessor"]
    vocab_file: FilePath
    max_predictions_per_seq: int = Field(default=20, ge=1)
    masked_lm_prob: float = Field(default=0.15, gt=0, lt=1)
    do_lower: Annotated[bool, _Tokenized] = True
    buckets: OnePaddedLength = None


class SentencesDataConfig(RecordSection):
    """Texts whose sentences are labelled: whether a sentence belongs to the summary.

    Attributes:
        max_cls_tokens: largest number of sentences of a text.
    """

    data_processor: Literal["BertSumCSVDataProcessor"]
    max_cls_tokens: int = Field(default=50, ge=1)
    vocab_file: Annotated[Any, _Tokenized] = None
    do_lower: Annotated[bool, _Tokenized] = True


class AnswerDataConfig(RecordSection):
    """Tokenized questions and texts, with the positions at which the answer starts and ends."""

    data_processor: Literal["BertQADataProcessor"]
    vocab_file: Annotated[Any, _Tokenized] = None


class RetrievalDataConfig(RecordSection):
    """Questions with passages. The first passage answers the question.

    Attributes:
        num_passages: number of passages of a question, including the one with the answer.
    """

    data_processor: Literal["DPRHDF5DataProcessor"]
    num_passages: int = Field(default=2, ge=1)


class PreferenceDataConfig(RecordSection):
    """Prompts with a preferred answer and a rejected answer."""

    data_processor: Literal["DpoHDF5DataProcessor"]
