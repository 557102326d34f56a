"""What a data loader's section may say: one class for each kind of data, found by the processor's name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headwater.config.base import AsTuple, FilePath, NoEffect, OneOrMore, Section


class LoaderSection(Section):
    """What every data loader takes.

    Attributes:
        batch_size: samples of one step over all ranks.
        shuffle: a random order of its own for each pass.
        shuffle_seed: order of the samples; the run's seed where absent.
        num_workers: processes that read ahead; 0 reads in the training process.
        prefetch_factor: batches each worker reads ahead.
        persistent_workers: keep the workers from one pass to the next.
        drop_last: leave out the samples that do not fill a batch.
    """

    batch_size: int = Field(ge=1)
    shuffle: bool = False
    shuffle_seed: Annotated[int | None, Field(ge=0)] = None
    num_workers: int = Field(default=0, ge=0)
    prefetch_factor: int = Field(default=2, ge=1)
    persistent_workers: bool = True
    drop_last: bool = True
    micro_batch_size: Annotated[
        Any, NoEffect("the plan chooses it; trainer.init.backend.micro_batch_size sets it")
    ] = None
    use_worker_cache: Annotated[Any, NoEffect("data are read from where they are")] = None
    shuffle_buffer: Annotated[Any, NoEffect("all samples are shuffled, not those of a buffer")] = None

    @property
    def leaves_out_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self.drop_last

    @property
    def place(self) -> str:
        """Where the data are, for messages."""
        folders = getattr(self, "data_dir", "")
        return ", ".join(map(str, folders)) if isinstance(folders, tuple) else str(folders)


Folders = Annotated[tuple[FilePath, ...], OneOrMore, Field(min_length=1)]
"""One folder or several."""


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


class GptDataConfig(LoaderSection):
    """Samples for next-word prediction in HDF5 files.

    Attributes:
        data_processor: the two spellings mean the same here.
        data_dir: folders with HDF5 files.
        vocab_size: number above every token id; beside the model's.
        data_transforms: what is done to each sample.
    """

    data_processor: Literal["GptHDF5DataProcessor", "GptHDF5MapDataProcessor"]
    data_dir: Folders
    vocab_size: Annotated[int | None, Field(ge=1)] = None
    data_transforms: Annotated[tuple[SinkTokensConfig, ...], AsTuple] = ()


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


class SentencesDataConfig(RecordSection):
    """Texts of sentences, each with whether it belongs to the summary.

    Attributes:
        max_cls_tokens: sentences of a text at most.
    """

    data_processor: Literal["BertSumCSVDataProcessor"]
    max_cls_tokens: int = Field(default=50, ge=1)


class RetrievalDataConfig(RecordSection):
    """Questions with passages, of which the first answers the question.

    Attributes:
        num_passages: passages of a question, the right one included.
    """

    data_processor: Literal["DPRHDF5DataProcessor"]
    num_passages: int = Field(default=2, ge=1)


class MNISTDataConfig(LoaderSection):
    """Handwritten digits in the IDX files of MNIST, compressed or not.

    Attributes:
        data_dir: folder with the files.
        split: `train`, or `val`: the test set.
        drop_last_batch: another name of `drop_last`.
        to_float16: pixels are fp32 here, and precision decides what becomes of them.
    """

    data_processor: Literal["MNISTDataProcessor"]
    data_dir: FilePath
    split: Literal["train", "val"] = "train"
    drop_last_batch: bool | None = None
    to_float16: Annotated[bool, NoEffect("the precision of the run holds")] = False

    @property
    def leaves_out_last(self) -> bool:
        return self.drop_last if self.drop_last_batch is None else self.drop_last_batch


DataConfig = (
    GptDataConfig
    | TextClassificationDataConfig
    | TokenClassificationDataConfig
    | MaskedTextDataConfig
    | DynamicMaskDataConfig
    | SentencesDataConfig
    | RetrievalDataConfig
    | MNISTDataConfig
)
"""Any data loader's section."""

AnyData = Annotated[DataConfig, Field(discriminator="data_processor")]
"""The same as a key of a params file: the data processor's name says which."""
