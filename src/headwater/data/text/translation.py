"""Translation data: files of texts and of their translations, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.config.data import TranslationDataConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.core.errors import DataError
from headwater.core.units import counted
from headwater.data.loader import Batch
from headwater.data.text.lines import read_lines
from headwater.data.text.tokens import (
    PairFiller,
    TokenLists,
    encoded,
    listed_files,
    open_vocabulary,
    text_files,
)


class Translations:
    """A data set of texts and their translations.

    `PairFiller.fill` describes a batch.

    Args:
        sources: tokens of the texts.
        targets: tokens of the translation of each text.
        filler: maker of batches.
    """

    def __init__(self, sources: TokenLists, targets: TokenLists, filler: PairFiller) -> None:
        self.sources, self.targets = sources, targets
        self._filler = filler

    @property
    def sequence_length(self) -> int:
        """Tokens of a source."""
        return self._filler.source_length

    def __len__(self) -> int:
        return len(self.sources)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        indices = [draw % len(self) for draw in draws]
        return self._filler.fill([(self.sources[index], self.targets[index]) for index in indices])


def read_translations(config: TranslationDataConfig, model: Seq2SeqConfig) -> Translations:
    """Return the data set that a section of a params file describes. Empty or too long pairs are left out.

    Raises:
        DataError: if a file is missing, two parallel files have different numbers of lines, or no pair is
            left.
    """
    vocabulary = open_vocabulary(config.src_vocab_file, config, model.source_tokens)
    written = vocabulary
    if config.tgt_vocab_file is not None:
        written = open_vocabulary(config.tgt_vocab_file, config, model.target_tokens)
    pairs = [pair for files in _files(config) for pair in _aligned(*files)]
    sources = encoded((source for source, _ in pairs), vocabulary, lower=config.do_lower)
    targets = encoded((target for _, target in pairs), written, lower=config.do_lower)
    kept = [
        pair
        for pair in zip(sources, targets, strict=True)
        # A target takes one more position: the start token in the input, and the end token in the labels.
        if 0 < len(pair[0]) <= config.src_max_sequence_length
        and 0 < len(pair[1]) < config.tgt_max_sequence_length
    ]
    if not kept:
        raise DataError(
            f"all {len(pairs)} pairs of texts are empty or too long" if pairs else "the files are empty",
            where=config.place,
            remedy="increase src_max_sequence_length and tgt_max_sequence_length, or use other files",
        )
    filler = PairFiller.of(config, written)
    return Translations(TokenLists(s for s, _ in kept), TokenLists(t for _, t in kept), filler)


def _files(config: TranslationDataConfig) -> list[tuple[Path, Path]]:
    """Return the files of texts, each with the file of its translations."""
    if config.tgt_data_dir is None:
        listed = [files for folder in config.src_data_dir for files in listed_files(folder)]
        if not listed or any(len(files) != 2 for files in listed):
            raise DataError(
                "the files of the translations are not set",
                where=config.place,
                remedy="set tgt_data_dir, or write lines `source target number_of_lines` into meta.dat",
            )
        return [(source, target) for source, target in listed]
    sources = [path for place in config.src_data_dir for path in text_files(place)]
    targets = [path for place in config.tgt_data_dir for path in text_files(place)]
    if len(sources) != len(targets):
        raise DataError(
            f"src_data_dir has {len(sources)} files, but tgt_data_dir has {len(targets)}",
            where=config.place,
            remedy="use the same number of files in both, in the same order",
        )
    return list(zip(sources, targets, strict=True))


def _aligned(source: Path, target: Path) -> list[tuple[str, str]]:
    read, written = ([line for _, line in read_lines(path)] for path in (source, target))
    if len(read) != len(written):
        raise DataError(
            f"the file has {counted(len(read), 'line', 'lines')}, but {target} has {len(written)}",
            where=str(source),
            remedy="use files with one translation per line",
        )
    return list(zip(read, written, strict=True))
