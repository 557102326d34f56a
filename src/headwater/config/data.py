"""What a data loader's section may say: one class for each kind of data, found by the processor's name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, NoEffect, OneOrMore, Section
from headwater.config.transforms import ResizeConfig, ToTensorConfig, Transforms, check_order


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


class TokenPairSection(LoaderSection):
    """What loaders of texts for encoder-decoders take.

    Attributes:
        src_data_dir: folders with the files that `meta.dat` there lists, or text files; a text a line.
        src_vocab_file: tokens, one a line, of texts that are cut at spaces; or a `tokenizer.json`.
        extra_ids: tokens above those of the file, that stand for spans of text.
        src_max_sequence_length: tokens of a text to read, filled up.
        tgt_max_sequence_length: likewise to write, with the token that begins or ends it.
        do_lower: lower case.
        dynamic_loss_weight: a sample counts the less per label the more labels it has.
        oov_token: stands for what is not in the vocabulary.
        sos_token: begins what is written.
        eos_token: ends it.
        pad_token: fills texts up.
        input_pad_id: does so for what is read, where it is another one.
        labels_pad_id: likewise for the labels.
    """

    src_data_dir: Folders
    src_vocab_file: FilePath
    extra_ids: int = Field(default=0, ge=0)
    src_max_sequence_length: int = Field(ge=4)
    tgt_max_sequence_length: int = Field(ge=4)
    do_lower: bool = False
    dynamic_loss_weight: bool = False
    oov_token: str = "<unk>"
    sos_token: str = "<s>"
    eos_token: str = "</s>"
    pad_token: str = "<pad>"
    input_pad_id: int | None = Field(default=None, ge=0)
    labels_pad_id: int | None = Field(default=None, ge=0)
    buckets: Annotated[Any, NoEffect("all samples are filled up to one length")] = None
    vocab_size: Annotated[Any, NoEffect("the model's holds")] = None

    @property
    def place(self) -> str:
        return ", ".join(map(str, self.src_data_dir))


class SpanCorruptionDataConfig(TokenPairSection):
    """Texts with spans left out, which are to be written (arXiv:1910.10683, section 3.1.4).

    Attributes:
        pack_sequences: join texts before they are cut into samples.
        num_documents_to_concatenate: how many of them.
    """

    data_processor: Literal["T5DynamicDataProcessor"]
    pack_sequences: bool = False
    num_documents_to_concatenate: int = Field(default=128, ge=1)
    tgt_data_dir: Annotated[Any, NoEffect("what is written is left out of what is read")] = None
    tgt_vocab_file: Annotated[Any, NoEffect("what is written is left out of what is read")] = None


class TranslationDataConfig(TokenPairSection):
    """Texts and their translations, in files that belong together line by line.

    Attributes:
        tgt_data_dir: translations of the texts in `src_data_dir`; where absent, `meta.dat` there lists both.
        tgt_vocab_file: of the translations, where they have a vocabulary of their own.
    """

    data_processor: Literal["TransformerDynamicDataProcessor"]
    tgt_data_dir: Folders | None = None
    tgt_vocab_file: FilePath | None = None
    pack_sequences: Annotated[Any, NoEffect("a translation is a sample of its own")] = None
    num_documents_to_concatenate: Annotated[Any, NoEffect("a translation is a sample of its own")] = None


class ImageFolderDataConfig(LoaderSection):
    """Images in a folder for each class: `data_dir`/`split`/CLASS/….

    Attributes:
        data_dir: the folder.
        split: folder in it.
        image_size: height and width to which images are scaled where there are no transforms; beside the
            model's.
        num_classes: beside the model's.
        transforms: what is done to each image, in this order.
    """

    data_processor: Literal["ImageNet1KProcessor"]
    data_dir: FilePath
    split: str = "train"
    image_size: Annotated[tuple[int, int], AsTuple] | None = None
    num_classes: Annotated[int | None, Field(ge=1)] = None
    transforms: Transforms = ()

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.transforms:
            check_order(self.transforms)
        return self

    @property
    def steps(self) -> Transforms:
        """What is done to each image."""
        resize = () if self.image_size is None else (ResizeConfig(name="resize", size=self.image_size),)
        return self.transforms or (*resize, ToTensorConfig(name="to_tensor"))


class SegmentationDataConfig(LoaderSection):
    """Images with a class for each pixel: equally named files in `data_dir`/image and `data_dir`/label.

    Attributes:
        data_dir: the folder.
        train_test_split: share of the files to train on, the first ones in the order of their names.
        is_training: those; otherwise the rest.
        image_size: height and width of the parts that are cut out; whole images where absent.
        augment_data: cut anywhere, turn by quarters and mirror at random when training; otherwise cut the
            middle out.
        normalize_data_method: numbers between 0 and 1, between -1 and 1, or of mean 0 and deviation 1 in
            each image.
    """

    data_processor: Literal["UNetDataProcessor"]
    data_dir: FilePath
    train_test_split: float = Field(default=0.85, ge=0, le=1)
    is_training: bool = True
    image_size: Annotated[tuple[int, int], AsTuple] | None = None
    augment_data: bool = True
    normalize_data_method: Literal["zero_one", "zero_centered", "standard_score"] = "standard_score"

    @property
    def augments(self) -> bool:
        """Whether parts are random."""
        return self.is_training and self.augment_data


DataConfig = (
    GptDataConfig
    | TextClassificationDataConfig
    | TokenClassificationDataConfig
    | MaskedTextDataConfig
    | DynamicMaskDataConfig
    | SentencesDataConfig
    | RetrievalDataConfig
    | MNISTDataConfig
    | SpanCorruptionDataConfig
    | TranslationDataConfig
    | ImageFolderDataConfig
    | SegmentationDataConfig
)
"""Any data loader's section."""

AnyData = Annotated[DataConfig, Field(discriminator="data_processor")]
"""The same as a key of a params file: the data processor's name says which."""
