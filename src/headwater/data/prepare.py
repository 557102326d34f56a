"""Preparation of training data from texts and records: tokenize, pack, shuffle, split.

It has two passes, each spread over worker processes. The first writes the tokens of all texts to one flat
temporary file. The second reads that file and writes the samples in random order. The shuffle therefore
covers the whole data set, while memory holds only a few blocks of text and a few numbers per sample. A killed
preparation continues where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from headwater.core.errors import ConfigError, DataError
from headwater.core.side_files import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, copy_side_files
from headwater.data.documents import Piece, find_inputs, read_pieces
from headwater.data.examples import Block, MakeExamples, Places, WriteExamples
from headwater.data.journal import Corpus
from headwater.data.modes import Mode, ModeOptions, find_mode
from headwater.data.modes.chat import PLAIN_TEMPLATE, find_template
from headwater.data.packing import Encode, WriteSamples, numbered_tasks, pack, split_samples
from headwater.data.raw_records import BadRecords, Record, read_records
from headwater.data.staging import staged_folder
from headwater.data.statistics import FILE_NAME, Statistics, entropy
from headwater.data.tokenizer import TrainBPE, end_of_text_id, load_tokenizer
from headwater.data.workers import ordered_map

_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that, together with the inputs, determine every byte of the output; see `prepare`."""

    tokenizer: Path | TrainBPE
    sequence_length: int
    val_fraction: float
    seed: int
    samples_per_file: int
    json_key: str
    end_of_text: str | None
    mode: str
    options: ModeOptions
    skip_bad_records: bool

    def __post_init__(self) -> None:
        for key in ("sequence_length", "samples_per_file"):
            if getattr(self, key) < 1:
                what = f"expected {key} of at least 1, got {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="use 1 or more")
        if not 0 <= self.val_fraction < 1:
            what = f"expected val_fraction in [0, 1), got {self.val_fraction}"
            remedy = "use a fraction such as 0.05, or 0 for no validation data"
            raise ConfigError(what, where="val_fraction", remedy=remedy)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain values. Paths are reduced to file names.

        The output therefore does not depend on the folders of the inputs.
        """
        settings = json.dumps(dataclasses.asdict(self), default=lambda path: path.name)
        plain: dict[str, Any] = json.loads(settings)
        return plain


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
    mode: str = "pretraining",
    options: ModeOptions | None = None,
    skip_bad_records: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> Statistics:
    """Write `train/`, `val/`, `tokenizer.json` and `statistics.json` to the new folder `output_dir`.

    The same inputs and settings produce the same bytes, for any `num_workers`, and also after a preparation
    that was killed and continued. The folder appears when everything in it is complete. Until then the files
    are in `output_dir` + `.partial`, where a preparation with the same inputs and settings continues.

    Args:
        inputs: txt, jsonl, json, csv (each plain or .gz) or parquet files, or folders of them.
        output_dir: folder to create.
        tokenizer: `TrainBPE` to train a tokenizer, or the path of a tokenizer (see `load_tokenizer`).
        sequence_length: tokens per sample.
        val_fraction: fraction of the samples that go to `val/`; at least one sample unless it is 0.
        seed: seed of the order of the samples, of the split, and of the random choices of the mode.
        num_workers: worker processes; 1 or less: work in this process.
        samples_per_file: samples in each file except the last.
        json_key: key of the text in records, in modes that read running text.
        end_of_text: token after each document; by default the end-of-text token of the tokenizer.
        mode: kind of the samples, a name in `headwater.data.modes.MODES`.
        options: options of the mode.
        skip_bad_records: leave out and count records that cannot be used; otherwise the first is an error.
        overwrite: replace prepared data that `output_dir` already holds.
        progress: show a progress bar.

    Returns:
        Figures of the prepared data.

    Raises:
        ConfigError: if a setting is out of range.
        DataError: if an input, the tokenizer or the output folder cannot be used.
    """
    options = options or ModeOptions()
    if mode == "chat" or mode == "preference":
        path = tokenizer if isinstance(tokenizer, Path) else None
        options = dataclasses.replace(options, chat_template=options.chat_template or find_template(path))
    settings = Settings(
        tokenizer,
        sequence_length,
        val_fraction,
        seed,
        samples_per_file,
        json_key,
        end_of_text,
        mode,
        options,
        skip_bad_records,
    )
    files = find_inputs(inputs)
    work = find_mode(mode, options)
    replace = overwrite and (output_dir / FILE_NAME).exists()
    key = _key(settings, files)
    try:
        with staged_folder(output_dir, replace=replace, key=key) as folder, _progress(progress) as bar:
            return _Preparation(settings, work, files, folder, num_workers, bar).run()
    except OSError as error:
        remedy = "make the folder writable, and free disk space (about 12 bytes per token are needed)"
        raise DataError(f"output cannot be written: {error}", where=str(output_dir), remedy=remedy) from error


def _key(settings: Settings, files: Sequence[Path]) -> str:
    """Return a key of this preparation; it changes with the settings and with any changed input."""
    sources = [*files, *([settings.tokenizer] if isinstance(settings.tokenizer, Path) else [])]
    stats = [path.stat() if path.exists() else None for path in sources]
    marks = [
        (str(path.resolve()), stat and (stat.st_size, stat.st_mtime_ns))
        for path, stat in zip(sources, stats, strict=True)
    ]
    return json.dumps([settings.as_json(), marks])


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """A preparation in progress, in a staged folder."""

    settings: Settings
    mode: Mode
    files: list[Path]
    folder: Path
    num_workers: int
    bar: Progress

    def run(self) -> Statistics:
        tokenizer = self._tokenizer()
        end = end_of_text_id(tokenizer, self.settings.end_of_text)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        bad = BadRecords(self.settings.skip_bad_records)
        with contextlib.closing(Corpus(self.folder, vocab_size)) as corpus:
            if self._is_stream:
                self._first_pass(Encode(tokenizer.to_str(), end), corpus, bad)
                samples, padding = self._write_windows(corpus), 0
            else:
                make = self._maker(tokenizer, end)
                self._first_pass(make, corpus, bad)
                self._check_usable(corpus, bad)
                samples, padding = self._write_examples(make, corpus)
            corpus.remove()
            statistics = self._statistics(corpus, samples, padding, vocab_size, end, bad)
        statistics.write(self.folder)
        return statistics

    def _maker(self, tokenizer: Tokenizer, end: int) -> MakeExamples:
        settings = self.settings
        pad = next((n for n in map(tokenizer.token_to_id, _PAD_NAMES) if n is not None), end)
        return MakeExamples(
            settings.mode,
            settings.options,
            tokenizer.to_str(),
            end,
            pad,
            settings.sequence_length,
            settings.seed,
            settings.skip_bad_records,
        )

    @property
    def _is_stream(self) -> bool:
        """True if samples are cut out of one continuous stream of tokens."""
        return self.settings.mode == "pretraining" and self.mode.packing == "joined"

    def _pieces(self, description: str, bad: BadRecords) -> Iterator[Piece]:
        """Return the pieces of all documents, read with a progress bar."""
        return self._shown(description, read_pieces(self.files, json_key=self.settings.json_key, bad=bad))

    def _shown(self, description: str, items: Iterator[Any]) -> Iterator[Any]:
        task = self.bar.add_task(description, total=sum(path.stat().st_size for path in self.files))
        for item in items:
            yield item
            self.bar.update(task, completed=item.file_bytes)

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer with the tokens that the mode needs, and save it in the folder."""
        path = self.folder / TOKENIZER_FILE
        if path.exists():
            return load_tokenizer(path)
        source = self.settings.tokenizer
        tokenizer = load_tokenizer(source) if isinstance(source, Path) else source.train(self._texts())
        missing = [token for token in self.mode.needed_tokens if tokenizer.token_to_id(token) is None]
        if missing:
            raise DataError(
                f"mode {self.settings.mode} needs the tokens {', '.join(missing)}, which the tokenizer lacks",
                where=str(source) if isinstance(source, Path) else "--vocab_size",
                remedy="pass the tokenizer of the model that you train (--tokenizer); for BERT its vocab.txt",
            )
        added = self.mode.added_tokens
        if added and all(tokenizer.token_to_id(token.replace("|", "")) is None for token in added):
            tokenizer.add_special_tokens([t for t in added if tokenizer.token_to_id(t) is None])
        if isinstance(source, Path):
            copy_side_files(source if source.is_dir() else source.parent, self.folder, but=(TOKENIZER_FILE,))
        self._keep_template()
        partial = path.with_suffix(".partial")
        tokenizer.save(str(partial))
        partial.rename(path)
        return tokenizer

    def _keep_template(self) -> None:
        """Write the chat template of the samples to the folder."""
        template = self.settings.options.chat_template
        if self.settings.mode == "chat":
            template = template or PLAIN_TEMPLATE
        if template is not None:
            (self.folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")

    def _texts(self) -> Iterator[str]:
        """Yield all texts of the input, for the training of a tokenizer."""
        bad = BadRecords(self.settings.skip_bad_records)
        if self.mode.reads == "documents":
            yield from (piece.text for piece in self._pieces("training tokenizer", bad))
        else:
            for record in self._shown("training tokenizer", read_records(self.files, bad)):
                yield from _strings(record.fields)

    def _first_pass(
        self, work: Callable[[tuple[int, Sequence[Any]]], Block], corpus: Corpus, bad: BadRecords
    ) -> None:
        """Add the blocks that `work` makes of all inputs to the corpus; skip tasks that it already holds."""
        tasks: Iterator[tuple[int, Sequence[Any]]]
        if self.mode.reads == "documents":
            tasks = numbered_tasks(self._pieces("tokenizing", bad), lambda piece: len(piece.text))
        else:
            records = self._shown("tokenizing", read_records(self.files, bad))
            tasks = numbered_tasks(records, _record_chars)
        done = corpus.progress.tasks
        for block in ordered_map(work, (task for task in tasks if task[0] >= done), self.num_workers):
            corpus.add(block)
        corpus.save()
        if corpus.progress.counts["documents"] == 0:
            names = ", ".join(map(str, self.files[:3]))
            raise DataError("the inputs contain no text", where=names, remedy="name files that are not empty")

    def _check_usable(self, corpus: Corpus, bad: BadRecords) -> None:
        """Check that at least one example was made.

        Raises:
            DataError: if all records were left out, with the reasons.
        """
        if corpus.progress.examples:
            return
        counts = corpus.progress.counts
        reasons = (
            ("cannot be used", bad.count + counts["bad"], "run without --skip_bad_records to see the reason"),
            ("empty", counts["empty"], "use records with text"),
            ("too long", counts["too_long"], "use a larger sequence_length, or --longer cut"),
        )
        found = [reason for reason in reasons if reason[1]]
        raise DataError(
            f"all records were left out: {', '.join(f'{name}: {count}' for name, count, _ in found)}",
            where=", ".join(map(str, self.files[:3])),
            remedy="; ".join(remedy for *_, remedy in found),
        )

    def _write_windows(self, corpus: Corpus) -> dict[str, int]:
        length = self.settings.sequence_length
        count = (corpus.progress.values - 1) // length
        splits = split_samples(count, self.settings.val_fraction, self.settings.seed)
        write = WriteSamples(corpus.values_path, length)
        return self._write(splits, lambda samples: samples, write, ".h5")

    def _write_examples(self, make: MakeExamples, corpus: Corpus) -> tuple[dict[str, int], int]:
        """Write all samples; return their number by split, and the number of padding positions."""
        lengths = corpus.lengths()
        starts = np.cumsum(lengths.sum(1), dtype=np.int64) - lengths.sum(1)
        numbers = np.arange(len(lengths))
        ends, length = numbers + 1, self.settings.sequence_length
        joined = self.mode.packing == "joined"
        # The last token of a text is only a label and takes no position. In joined texts this is true only
        # of the last token of the last text; `length + joined` below accounts for it.
        sizes = lengths[:, 0].astype(np.int64) - (not joined)
        if self.mode.in_rows and self.mode.packing != "single":
            numbers, ends = pack(sizes, length + joined)
        places = Places(numbers, starts[numbers], lengths[numbers], ends)
        splits = split_samples(len(places), self.settings.val_fraction, self.settings.seed)
        is_table = self.settings.options.dynamic_mask and self.settings.mode == "masked"
        suffix = ".txt" if self.mode.line is not None else ".csv" if is_table else ".h5"
        samples = self._write(splits, places.take, WriteExamples(corpus.values_path, make), suffix)
        filled = int(sizes.sum()) - len(places) * joined
        return samples, len(places) * length - filled if self.mode.in_rows else 0

    def _write(
        self,
        splits: dict[str, Any],
        task_of: Callable[[Any], Any],
        write: Callable[[tuple[Path, Any]], int],
        suffix: str,
    ) -> dict[str, int]:
        """Write the samples of each split to files; return the number of samples by split.

        Files that exist are skipped: `write` renames a file to its name only when it is complete.
        """
        per_file = self.settings.samples_per_file
        bar = self.bar.add_task("writing samples", total=sum(map(len, splits.values())))

        def tasks() -> Iterator[tuple[Path, Any]]:
            for name, samples in splits.items():
                (self.folder / name).mkdir(exist_ok=True)
                for number, start in enumerate(range(0, len(samples), per_file)):
                    path = self.folder / name / f"data-{number:05d}{suffix}"
                    part = samples[start : start + per_file]
                    if path.exists():
                        self.bar.advance(bar, len(part))
                    else:
                        yield path, task_of(part)

        for count in ordered_map(write, tasks(), self.num_workers):
            self.bar.advance(bar, count)
        return {name: len(samples) for name, samples in splits.items()}

    def _statistics(
        self,
        corpus: Corpus,
        samples: dict[str, int],
        padding: int,
        vocab_size: int,
        end: int,
        bad: BadRecords,
    ) -> Statistics:
        progress, length = corpus.progress, self.settings.sequence_length
        counts, tokens = progress.counts, int(progress.token_counts.sum())
        positions = sum(samples.values()) * length
        return Statistics(
            documents=counts["documents"],
            text_bytes=counts["text_bytes"],
            tokens=tokens,
            dropped_tokens=tokens - positions if self._is_stream else 0,
            bytes_per_token=counts["text_bytes"] / max(tokens, 1),
            unigram_entropy=entropy(progress.token_counts),
            vocab_size=vocab_size,
            end_of_text_id=end,
            sequence_length=length,
            train_samples=samples["train"],
            val_samples=samples["val"],
            tokenizer_file=TOKENIZER_FILE,
            settings={**self.settings.as_json(), "inputs": [path.name for path in self.files]},
            mode=self.settings.mode,
            loss_tokens=positions - padding if self.mode.packing == "joined" else counts["loss_tokens"],
            padding_tokens=padding,
            bad_records=bad.count + counts["bad"],
            empty_records=counts["empty"],
            too_long_records=counts["too_long"],
            cut_records=counts["cut"],
            images=counts["images"],
        )


def _record_chars(record: Record) -> int:
    return sum(len(text) for text in _strings(record.fields)) + 1


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _progress(show: bool) -> Progress:
    columns = ("{task.description:>18}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not show)
