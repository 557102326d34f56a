"""BERT's tokenizer from its file of tokens."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from headwater.core.errors import DataError

PAD, UNKNOWN, BEGIN, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"


def wordpiece(vocab_file: Path, *, lower: bool, length: int, vocab_size: int) -> Tokenizer:
    """A tokenizer that gives `[CLS] text [SEP]` or `[CLS] first [SEP] second [SEP]` in `length` tokens.

    Longer texts are cut, the longer of two first; shorter ones are filled up.

    Args:
        vocab_file: tokens, one a line.
        lower: lower case, without accents.
        length: tokens of a sample.
        vocab_size: the model's.

    Raises:
        DataError: if the file is missing, lacks one of BERT's own tokens, or has more than the model.
    """
    numbers = read_vocabulary(vocab_file, vocab_size, needed=(PAD, UNKNOWN, BEGIN, SEPARATOR))
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {SEPARATOR}",
        pair=f"{BEGIN} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(token, numbers[token]) for token in (BEGIN, SEPARATOR)],
    )
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=numbers[PAD], pad_token=PAD)
    return tokenizer


def read_vocabulary(vocab_file: Path, vocab_size: int, *, needed: Collection[str]) -> dict[str, int]:
    """The number of each token.

    Args:
        vocab_file: tokens, one a line.
        vocab_size: the model's.
        needed: tokens that must be there.

    Raises:
        DataError: if the file is missing, lacks a token, or has more than the model.
    """
    try:
        tokens = vocab_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the tokens: {error}",
            where=f"vocab_file: {vocab_file}",
            remedy="name BERT's vocab.txt",
        ) from error
    numbers = {token.rstrip("\r"): number for number, token in enumerate(tokens) if token}
    absent = [token for token in needed if token not in numbers]
    if absent:
        raise DataError(
            f"the tokens {', '.join(absent)} are missing",
            where=str(vocab_file),
            remedy="name BERT's vocab.txt",
        )
    if max(numbers.values()) >= vocab_size:
        raise DataError(
            f"there are {max(numbers.values()) + 1} tokens, and the model's vocab_size is {vocab_size}",
            where=str(vocab_file),
            remedy="set vocab_size to the number of tokens, or name the model's file",
        )
    return numbers
