"""Conversion of SentencePiece models (`tokenizer.model`, `spiece.model`) to the tokenizers library.

The file is a protocol buffer (`sentencepiece_model.proto`) with the pieces and their scores, the settings of
the training, and the normalization rules. This module reads the wire format itself, so that no further
library is needed.

The tokens are those of the SentencePiece library, with three exceptions. The name of a control piece in a
text, such as `</s>`, becomes that piece, as in every `tokenizer.json`. If two segmentations of a text have
the same score up to rounding, a unigram model may choose the other one. Normalization rules apply to a
character together with its combining accents.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from headwater.core.errors import DataError

SUFFIX = ".model"
SPACE = "▁"
"""Character that represents a space in pieces."""


class _Kind(enum.IntEnum):
    """Kind of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _ModelType(enum.IntEnum):
    UNIGRAM = 1
    BPE = 2


@dataclasses.dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclasses.dataclass(frozen=True)
class _Model:
    """Content of a SentencePiece model file.

    Attributes:
        pieces: the pieces, indexed by token id.
        type: a `_ModelType`, or the number of an unsupported type.
        byte_fallback: encode an unknown character as one token per byte.
        suffix_spaces: a space belongs to the word before it.
        rules: compiled normalization rules; empty for a model without rules.
        dummy_prefix: put a space before each text.
        single_spaces: remove spaces at both ends and merge repeated spaces.
        escape_spaces: replace spaces by `SPACE`.
    """

    pieces: list[_Piece]
    type: int
    byte_fallback: bool
    suffix_spaces: bool
    rules: bytes
    dummy_prefix: bool
    single_spaces: bool
    escape_spaces: bool


def load_sentencepiece(path: Path) -> Tokenizer:
    """Return a tokenizer for the SentencePiece model at `path`.

    Raises:
        DataError: if it is not such a model, is damaged, or has a feature that is not supported.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"file cannot be read: {error.strerror}",
            where=str(path),
            remedy="make the file readable, or name another tokenizer",
        ) from error
    try:
        model = _parse(data)
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise DataError(
            f"file is not a SentencePiece model, or is damaged: {error}",
            where=str(path),
            remedy="copy the file again, or name a tokenizer.json",
        ) from error
    _refuse_unsupported(model, path)
    return _tokenizer(model)


def _refuse_unsupported(model: _Model, path: Path) -> None:
    problem = None
    if model.type not in list(_ModelType):
        problem = f"expected model type 1 (unigram) or 2 (BPE), got {model.type}"
    elif model.suffix_spaces:
        problem = "it treats whitespace as a suffix (treat_whitespace_as_suffix)"
    elif not model.escape_spaces:
        problem = "it does not escape whitespace (escape_whitespaces is off)"
    elif not any(piece.kind == _Kind.UNKNOWN for piece in model.pieces):
        problem = "it has no piece for unknown characters"
    # The tokenizers library splits a text at such symbols before it adds spaces. Each part would get a space.
    elif model.type == _ModelType.BPE and model.dummy_prefix and _texts(model, _Kind.USER_DEFINED):
        problem = (
            "it is a BPE model with user-defined symbols and a space before each text (add_dummy_prefix)"
        )
    if problem is not None:
        raise DataError(
            f"the SentencePiece model is not supported: {problem}",
            where=str(path),
            remedy="convert it to a tokenizer.json, for example with the transformers library",
        )


def _tokenizer(model: _Model) -> Tokenizer:
    unknown = next(index for index, piece in enumerate(model.pieces) if piece.kind == _Kind.UNKNOWN)
    built: models.Model
    if model.type == _ModelType.BPE:
        vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
        built = models.BPE(
            vocab=vocab,
            merges=_merges(model.pieces),
            unk_token=model.pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=False,
        )
    else:
        built = models.Unigram(_scores(model.pieces), unk_id=unknown, byte_fallback=model.byte_fallback)
    tokenizer = Tokenizer(built)
    tokenizer.normalizer = _normalizer(model)
    tokenizer.decoder = _decoder(model)
    control = _texts(model, _Kind.CONTROL)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    # A unigram model finds these symbols by their scores, see `_scores`.
    if model.type == _ModelType.BPE:
        whole = _texts(model, _Kind.USER_DEFINED)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    return tokenizer


def _texts(model: _Model, kind: _Kind) -> list[str]:
    return [piece.text for piece in model.pieces if piece.kind == kind]


def _scores(pieces: Sequence[_Piece]) -> list[tuple[str, float]]:
    """Return the text and score of each piece, for the search of the best segmentation.

    As in SentencePiece, a user-defined symbol scores higher than any other segmentation of the same text.
    Other pieces that are not normal text get the score of the worst normal piece.
    """
    normal = [piece.score for piece in pieces if piece.kind == _Kind.NORMAL]
    best, worst = max(normal, default=0.0), min(normal, default=0.0)

    def score(piece: _Piece) -> float:
        if piece.kind == _Kind.USER_DEFINED:
            return len(piece.text.encode()) * best - 0.1
        return piece.score if piece.kind == _Kind.NORMAL else worst

    return [(piece.text, score(piece)) for piece in pieces]


def _merges(pieces: Sequence[_Piece]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece when joined, in order of falling score."""
    known = {piece.text: index for index, piece in enumerate(pieces) if piece.kind == _Kind.NORMAL}
    merges = []
    for text, index in known.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                merges.append((-pieces[index].score, index, left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for *_, left, right in merges]


def _normalizer(model: _Model) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    # The order matters: the rules turn other whitespace into spaces, and must not remove the space in front.
    if model.rules:
        steps.append(normalizers.Precompiled(model.rules))
    if model.single_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: _Model) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _parse(data: bytes) -> _Model:
    pieces: list[_Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_parse_piece(_as_bytes(value)))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("no pieces found")
    # `sentencepiece_model.proto` defines the numbers of the fields, and their defaults.
    return _Model(
        pieces=pieces,
        type=int(trainer.get(3, _ModelType.UNIGRAM)),
        byte_fallback=bool(trainer.get(35, False)),
        suffix_spaces=bool(trainer.get(24, False)),
        rules=_as_bytes(normalizer.get(2, b"")),
        dummy_prefix=bool(normalizer.get(3, True)),
        single_spaces=bool(normalizer.get(4, True)),
        escape_spaces=bool(normalizer.get(5, True)),
    )


def _parse_piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))
    return _Piece(_as_bytes(fields.get(1, b"")).decode(), score, int(fields.get(3, _Kind.NORMAL)))


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("expected a field of bytes, got an integer")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a message: integers for varints, bytes for all others."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        wire = tag & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"unknown wire type {wire} at byte {place}")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, place = _varint(data, place)
        if place + length > len(data):
            raise ValueError(f"a field at byte {place} is cut off")
        yield tag >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError(f"a number at byte {place} has more than 64 bits")
