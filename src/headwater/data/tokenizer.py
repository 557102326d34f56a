"""Tokenizers: trained on the input, or loaded from the files of other libraries."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headwater.core.errors import ConfigError, DataError
from headwater.core.names import similar
from headwater.data.sentencepiece import SUFFIX, load_sentencepiece
from headwater.data.text.wordpiece import wordpiece

Built = TypeVar("Built")

END_OF_TEXT = "<|endoftext|>"

# The order matters: a tokenizer may have several of these, and Llama 3 ends turns with <|eot_id|>, not texts.
_END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
_VOCAB_NAMES = ("encoder.json", "vocab.json")
_MERGES_NAMES = ("vocab.bpe", "merges.txt")
_MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_SMALLEST_VOCAB = 257
"""Number of tokens of the smallest vocabulary: 256 bytes and the end-of-text token."""
_LARGEST_VOCAB = 1 << 22
"""Most tokens. The tokenizers library first reserves memory for all of them. If there is too little, it ends
the process."""


_LONGEST_WORD = 64
_LONG_WORD = re.compile(
    "|".join(rf"{kind}{{{_LONGEST_WORD + 1},}}" for kind in (r"[^\W\d_]", r"\d", r"[^a-zA-Z0-9\s]", r"\s"))
)
"""Pattern of a run of letters, digits, other characters or spaces that is longer than `_LONGEST_WORD`."""


@dataclasses.dataclass(frozen=True)
class TrainBPE:
    """Settings of a byte-level BPE tokenizer that is trained on the input.

    Attributes:
        vocab_size: maximum number of tokens, special tokens included; a small input yields fewer.
        special_tokens: tokens that never come from text, such as the end-of-text token.

    Raises:
        ConfigError: if `vocab_size` is too small or too large.
    """

    vocab_size: int
    special_tokens: tuple[str, ...] = (END_OF_TEXT,)

    def __post_init__(self) -> None:
        if self.vocab_size < _SMALLEST_VOCAB:
            what = (
                f"expected vocab_size of at least {_SMALLEST_VOCAB} (256 bytes and the end-of-text token), "
                f"got {self.vocab_size}"
            )
            raise ConfigError(what, where="vocab_size", remedy="use a larger one, for example 4096")
        if self.vocab_size > _LARGEST_VOCAB:
            what = f"expected vocab_size of at most {_LARGEST_VOCAB:,}, got {self.vocab_size:,}"
            raise ConfigError(what, where="vocab_size", remedy="use a smaller one, for example 50000")

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Return a tokenizer trained on `texts`. It is the same if a text is cut between two words."""
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=2,
            special_tokens=list(self.special_tokens),
            # Sorted, because the library returns the alphabet in a different order in each process.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(itertools.chain.from_iterable(map(_short_words, texts)), trainer)
        return tokenizer


def _short_words(text: str) -> Iterator[str]:
    """Yield a text in parts whose words have at most `_LONGEST_WORD` characters.

    The time of training grows with the square of the length of a word.
    """
    start = 0
    for match in _LONG_WORD.finditer(text):
        for cut in range(match.start() + _LONGEST_WORD, match.end(), _LONGEST_WORD):
            yield text[start:cut]
            start = cut
    yield text[start:]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a tokenizer.json; a SentencePiece `.model`; BERT's vocab.txt (WordPiece tokens, one per line);
            or a folder with a tokenizer.json, a SentencePiece model, or GPT-2's vocabulary and merges.

    Raises:
        DataError: if `path` does not hold a tokenizer, or the tokenizer is damaged.
    """
    if path.is_file():
        return _READERS.get(path.suffix, _from_json)(path)
    if not path.is_dir():
        raise DataError("tokenizer does not exist", where=str(path), remedy=_REMEDY)
    if (path / "tokenizer.json").is_file():
        return _from_json(path / "tokenizer.json")
    model = _first_file(path, _MODEL_NAMES)
    if model is not None:
        return load_sentencepiece(model)
    vocab, merges = (_first_file(path, names) for names in (_VOCAB_NAMES, _MERGES_NAMES))
    if vocab is None or merges is None:
        found = vocab or merges
        missing = " or ".join(_MERGES_NAMES if merges is None else _VOCAB_NAMES)
        what = (
            "the folder has no tokenizer"
            if found is None
            else f"the folder has {found.name}, but no {missing}"
        )
        raise DataError(what, where=str(path), remedy=_REMEDY)
    return _from_pair(vocab, merges)


def end_of_text_id(tokenizer: Tokenizer, name: str | None = None) -> int:
    """Return the id of the end-of-text token.

    Args:
        tokenizer: tokenizer to search.
        name: text of the token; by default the first of the usual names that the tokenizer has.

    Raises:
        DataError: if the tokenizer has no such token.
    """
    for candidate in (name,) if name else _END_OF_TEXT_NAMES:
        index = tokenizer.token_to_id(candidate)
        if index is not None:
            return int(index)
    special = sorted(str(token.content) for token in tokenizer.get_added_tokens_decoder().values())
    near = similar(name or END_OF_TEXT, special, count=3, cutoff=0.3) or special[:5]
    remedy = "name a token of the tokenizer with --end_of_text" + (f": {', '.join(near)}" if near else "")
    raise DataError(
        "tokenizer has no end-of-text token", where=name or ", ".join(_END_OF_TEXT_NAMES), remedy=remedy
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one. The ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_json(path: Path) -> Tokenizer:
    content = _read_json(path)
    if not {"model", "added_tokens"} <= content.keys():
        raise DataError(
            "file is not a tokenizer.json: it lacks the keys `model` and `added_tokens`",
            where=str(path),
            remedy=_REMEDY,
        )
    tokenizer = _built(path, lambda: Tokenizer.from_str(json.dumps(content)))
    # The file may have a length from its training: texts must stay whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_tokens(path: Path) -> Tokenizer:
    """Return BERT's tokenizer of a vocab.txt. It lowercases text unless a token has capital letters."""
    words = _read_text(path).split("\n")
    lower = all(word == word.lower() for word in words if not word.startswith("["))
    # The limit on the length is removed below: texts are cut into samples after tokenization.
    tokenizer = wordpiece(path, lower=lower, length=3, vocab_size=len(words))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_pair(vocab_path: Path, merges_path: Path) -> Tokenizer:
    """Return the tokenizer of GPT-2's two files: a JSON object of token ids, and a text file of merges.

    The second file has a `#version` line and then one merge per line.
    """
    vocab = _read_json(vocab_path)
    merges = []
    for number, line in enumerate(_read_text(merges_path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            what = f"expected two tokens in a merge, got {len(parts)}"
            raise DataError(what, where=f"{merges_path}, line {number}", remedy="download the file again")
        merges.append((parts[0], parts[1]))
    tokenizer = _byte_level(_built(merges_path, lambda: models.BPE(vocab=vocab, merges=merges)))
    if END_OF_TEXT in vocab:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _built(path: Path, build: Callable[[], Built]) -> Built:
    try:
        return build()
    except Exception as error:  # for a bad file the tokenizers library raises plain `Exception`
        raise DataError(f"tokenizer is damaged: {error}", where=str(path), remedy=_REMEDY) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise DataError(f"file is not JSON: {error}", where=str(path), remedy=_REMEDY) from error
    if not isinstance(content, dict):
        raise DataError("file does not hold a JSON object", where=str(path), remedy=_REMEDY)
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError("file is not UTF-8 text", where=str(path), remedy=_REMEDY) from error
    except OSError as error:
        raise DataError(f"file cannot be read: {error.strerror}", where=str(path), remedy=_REMEDY) from error


def _first_file(folder: Path, names: Iterable[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


_REMEDY = (
    "name a tokenizer.json, SentencePiece's tokenizer.model, BERT's vocab.txt, or a folder that holds one of "
    "the first two or GPT-2's vocab.json and merges.txt (encoder.json and vocab.bpe); on a command line use "
    "--tokenizer"
)

_READERS: dict[str, Callable[[Path], Tokenizer]] = {".txt": _from_tokens, SUFFIX: load_sentencepiece}
"""Readers by suffix; a file with any other suffix is read as a tokenizer.json."""
