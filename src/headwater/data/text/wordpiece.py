"""BERT's WordPiece tokenizer, built from a vocab.txt."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from headwater.core.errors import DataError
from headwater.core.files import why_unreadable

PAD, UNKNOWN, BEGIN, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"


def wordpiece(vocab_file: Path, *, lower: bool, length: int, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of texts and of pairs of texts, with `length` tokens for each.

    It makes `[CLS] text [SEP]` or `[CLS] first [SEP] second [SEP]`. Longer texts are cut; of two texts, the
    longer is cut first. Shorter texts are padded.

    Args:
        vocab_file: vocabulary, one token per line.
        lower: convert to lower case and remove accents.
        length: tokens per sample.
        vocab_size: vocabulary of the model.

    Raises:
        DataError: if the file is missing, lacks a special token of BERT, or has more tokens than the model.
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
    """Return the id of each token.

    Args:
        vocab_file: vocabulary, one token per line.
        vocab_size: vocabulary of the model.
        needed: tokens that the file must have.

    Raises:
        DataError: if the file is missing, lacks a needed token, or has more tokens than the model.
    """
    try:
        # `splitlines` would also split at Unicode's line separators, which may be tokens.
        tokens = vocab_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the vocabulary cannot be read: {why_unreadable(error)}",
            where=f"vocab_file: {vocab_file}",
            remedy="name BERT's vocab.txt",
        ) from error
    numbers = {token.rstrip("\r"): number for number, token in enumerate(tokens) if token}
    absent = [token for token in needed if token not in numbers]
    if absent:
        raise DataError(
            f"the vocabulary lacks the tokens {', '.join(absent)}",
            where=str(vocab_file),
            remedy="use BERT's vocab.txt",
        )
    if max(numbers.values()) >= vocab_size:
        raise DataError(
            f"expected at most {vocab_size} tokens, the model's vocab_size; got {max(numbers.values()) + 1}",
            where=str(vocab_file),
            remedy="set vocab_size to the number of tokens, or use the vocabulary of the model",
        )
    return numbers
