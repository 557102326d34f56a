"""Text to HDF5: tokenize, pack, shuffle, split.

Two passes, each spread over worker processes. The first writes the tokens of all documents one after the
other into a flat temporary file; the second cuts that file into samples in random order. So the shuffle is
over the whole data set, while memory holds a few blocks of text, or eight bytes a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from headwater.core.errors import ConfigError, DataError
from headwater.data.documents import Piece, find_inputs, read_pieces
from headwater.data.order import Indices
from headwater.data.packing import Encode, WriteSamples, split_samples, task_blocks
from headwater.data.staging import staged_folder
from headwater.data.statistics import FILE_NAME, Statistics, entropy
from headwater.data.tokenizer import TrainBPE, end_of_text_id, load_tokenizer
from headwater.data.workers import ordered_map

TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the bytes of the output, besides the inputs; see `prepare`."""

    tokenizer: Path | TrainBPE
    sequence_length: int
    val_fraction: float
    seed: int
    samples_per_file: int
    json_key: str
    end_of_text: str | None

    def __post_init__(self) -> None:
        for key in ("sequence_length", "samples_per_file"):
            if getattr(self, key) < 1:
                what = f"{key} is {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="write a whole number above 0")
        if not 0 <= self.val_fraction < 1:
            what = f"val_fraction is {self.val_fraction}"
            raise ConfigError(
                what, where="val_fraction", remedy="write a fraction such as 0.05, or 0 for none"
            )

    def as_json(self) -> dict[str, Any]:
        """Without folders, so that the output does not depend on where the inputs lie."""
        settings = dataclasses.asdict(self)
        if isinstance(self.tokenizer, Path):
            settings["tokenizer"] = self.tokenizer.name
        return settings


def prepare(
    inputs: Sequence[Path],
    output_dir: Path,
    *,
    tokenizer: Path | TrainBPE,
    sequence_length: int,
    val_fraction: float = 0.05,
    seed: int = 0,
    num_workers: int = 1,
    samples_per_file: int = 8192,
    json_key: str = "text",
    end_of_text: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Statistics:
    """Makes `output_dir` with `train/` and `val/` (HDF5), `tokenizer.json` and `statistics.json`.

    The same inputs and settings give the same bytes, whatever `num_workers`. The folder appears when
    everything in it is complete; what a killed preparation left (`output_dir` + `.partial`) is not read.

    Args:
        inputs: txt, txt.gz, jsonl or jsonl.gz files, or folders of them.
        output_dir: folder to make.
        tokenizer: `TrainBPE` to train one, or where it is (see `load_tokenizer`).
        sequence_length: tokens of a sample; documents are packed end to end, and cut where a sample ends.
        val_fraction: share of the samples that go to `val/`; at least one unless 0.
        seed: of the order of the samples and of the choice of those in `val/`.
        num_workers: worker processes; at most 1: none, but the tokenizer uses threads.
        samples_per_file: samples in each HDF5 file but the last.
        json_key: key of the text in jsonl lines.
        end_of_text: token put after each document; by default the one the tokenizer has.
        overwrite: replace data prepared there before.
        progress: show a progress bar.

    Raises:
        ConfigError: for a setting out of range.
        DataError: for input, tokenizer or output that cannot be used.
    """
    settings = Settings(
        tokenizer, sequence_length, val_fraction, seed, samples_per_file, json_key, end_of_text
    )
    files = find_inputs(inputs)
    replace = overwrite and (output_dir / FILE_NAME).exists()
    try:
        with staged_folder(output_dir, replace=replace) as folder, _progress(progress) as bar:
            return _Preparation(settings, files, folder, num_workers, bar).run()
    except OSError as error:
        remedy = "see that the folder can be written and that the disk has room (about 12 bytes a token)"
        raise DataError(f"output cannot be written: {error}", where=str(output_dir), remedy=remedy) from error


@dataclasses.dataclass(frozen=True)
class _Preparation:
    settings: Settings
    files: list[Path]
    folder: Path
    num_workers: int
    bar: Progress

    def run(self) -> Statistics:
        tokenizer = self._tokenizer()
        tokenizer.save(str(self.folder / TOKENIZER_FILE))
        encode = Encode(tokenizer.to_str(), end_of_text_id(tokenizer, self.settings.end_of_text))
        corpus = self._tokenize(encode, max(tokenizer.get_vocab().values()) + 1)
        splits = self._split(corpus.tokens)
        self._write_samples(splits)
        self._corpus_path.unlink()
        statistics = Statistics(
            documents=corpus.documents,
            text_bytes=corpus.text_bytes,
            tokens=corpus.tokens,
            dropped_tokens=corpus.tokens - sum(map(len, splits.values())) * self.settings.sequence_length,
            bytes_per_token=corpus.text_bytes / corpus.tokens,
            unigram_entropy=entropy(corpus.token_counts),
            vocab_size=len(corpus.token_counts),
            end_of_text_id=encode.end_of_text_id,
            sequence_length=self.settings.sequence_length,
            train_samples=len(splits["train"]),
            val_samples=len(splits["val"]),
            tokenizer_file=TOKENIZER_FILE,
            settings={**self.settings.as_json(), "inputs": [path.name for path in self.files]},
        )
        statistics.write(self.folder)
        return statistics

    @property
    def _corpus_path(self) -> Path:
        return self.folder / "tokens.bin"

    def _pieces(self, description: str) -> Iterator[Piece]:
        """All text, with a progress bar."""
        task = self.bar.add_task(description, total=sum(path.stat().st_size for path in self.files))
        for piece in read_pieces(self.files, json_key=self.settings.json_key):
            yield piece
            self.bar.update(task, completed=piece.file_bytes)

    def _tokenizer(self) -> Tokenizer:
        source = self.settings.tokenizer
        if isinstance(source, Path):
            return load_tokenizer(source)
        return source.train(piece.text for piece in self._pieces("training tokenizer"))

    def _tokenize(self, encode: Encode, vocab_size: int) -> _Corpus:
        """Writes the tokens of all documents to the corpus file."""
        corpus = _Corpus(np.zeros(vocab_size, dtype=np.int64))
        blocks = task_blocks(corpus.count_text(self._pieces("tokenizing")))
        with self._corpus_path.open("wb") as file:
            for tokens in ordered_map(encode, blocks, self.num_workers):
                corpus.token_counts += np.bincount(tokens, minlength=vocab_size)
                file.write(tokens.tobytes())
        if corpus.documents == 0:
            names = ", ".join(map(str, self.files[:3]))
            raise DataError("inputs hold no text", where=names, remedy="name files that are not empty")
        return corpus

    def _split(self, num_tokens: int) -> dict[str, Indices]:
        num_samples = (num_tokens - 1) // self.settings.sequence_length
        return split_samples(num_samples, self.settings.val_fraction, self.settings.seed)

    def _write_samples(self, splits: dict[str, Indices]) -> None:
        per_file = self.settings.samples_per_file
        tasks = []
        for name, samples in splits.items():
            (self.folder / name).mkdir()
            for number, start in enumerate(range(0, len(samples), per_file)):
                path = self.folder / name / f"data-{number:05d}.h5"
                tasks.append((path, samples[start : start + per_file]))
        write = WriteSamples(self._corpus_path, self.settings.sequence_length)
        task = self.bar.add_task("writing samples", total=sum(map(len, splits.values())))
        for count in ordered_map(write, tasks, self.num_workers):
            self.bar.advance(task, count)


@dataclasses.dataclass
class _Corpus:
    """Counts of what has passed; `token_counts` [vocab_size]."""

    token_counts: npt.NDArray[np.int64]
    documents: int = 0
    text_bytes: int = 0

    @property
    def tokens(self) -> int:
        return int(self.token_counts.sum())

    def count_text(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.documents += piece.ends_document
            self.text_bytes += piece.text_bytes
            yield piece


def _progress(show: bool) -> Progress:
    columns = ("{task.description:>18}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not show)
