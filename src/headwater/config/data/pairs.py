"""The schema of pairs of texts for encoder-decoders."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headwater.config.base import FilePath, NoEffect
from headwater.config.data.common import Folders, FromModel, LoaderSection, OnePaddedLength


class TokenPairSection(LoaderSection):
    """The keys of loaders of texts for encoder-decoders.

    Attributes:
        src_data_dir: folders of text files with a text on each line; a file `meta.dat` can list the files.
        src_vocab_file: file with a token on each line, for texts that are split at spaces; or a
            `tokenizer.json`.
        extra_ids: number of further token ids after those of the file, which stand for spans of text.
        src_max_sequence_length: tokens of an input text, including padding.
        tgt_max_sequence_length: tokens of an output text, including padding and the start or end token.
        do_lower: convert texts to lower case.
        dynamic_loss_weight: give each label of a sample a smaller weight if the sample has more labels.
        oov_token: token for words that are not in the vocabulary.
        sos_token: start token of output texts.
        eos_token: end token of texts.
        pad_token: padding token.
        input_pad_id: id of the padding of input texts, if it is not that of `pad_token`.
        labels_pad_id: id of the padding of labels, if it is not that of `pad_token`.
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
    buckets: OnePaddedLength = None
    vocab_size: FromModel = None

    @property
    def place(self) -> str:
        return ", ".join(map(str, self.src_data_dir))


class SpanCorruptionDataConfig(TokenPairSection):
    """Texts with spans removed; the model predicts the spans (arXiv:1910.10683, section 3.1.4).

    Attributes:
        pack_sequences: concatenate texts before they are split into samples.
        num_documents_to_concatenate: number of texts to concatenate.
    """

    data_processor: Literal["T5DynamicDataProcessor"]
    pack_sequences: bool = False
    num_documents_to_concatenate: int = Field(default=128, ge=1)
    tgt_data_dir: Annotated[Any, NoEffect("the outputs are spans of the inputs")] = None
    tgt_vocab_file: Annotated[Any, NoEffect("the outputs are spans of the inputs")] = None


class TranslationDataConfig(TokenPairSection):
    """Texts and their translations, on the same lines of two files.

    Attributes:
        tgt_data_dir: folders of the translations; if absent, `meta.dat` in `src_data_dir` lists both files.
        tgt_vocab_file: vocabulary of the translations, if it differs from that of the texts.
    """

    data_processor: Literal["TransformerDynamicDataProcessor"]
    tgt_data_dir: Folders | None = None
    tgt_vocab_file: FilePath | None = None
    pack_sequences: Annotated[Any, NoEffect("each translation is one sample")] = None
    num_documents_to_concatenate: Annotated[Any, NoEffect("each translation is one sample")] = None
