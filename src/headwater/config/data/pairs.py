"""Data of pairs of texts for encoder-decoders."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headwater.config.base import FilePath, NoEffect
from headwater.config.data.common import Folders, LoaderSection


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
