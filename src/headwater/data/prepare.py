"""Preparation of training data from texts and records: tokenize, pack, shuffle, split.

It has two passes, each spread over worker processes. The first writes the tokens of all texts to one flat
temporary file. The second reads that file and writes the samples in random order. The shuffle therefore
covers the whole data set, while memory holds only a few blocks of text and a few numbers per sample. A search
for near-duplicates is one more pass, before these two. A killed preparation continues where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.core.side_files import TOKENIZER_FILE
from headwater.data.documents import find_inputs
from headwater.data.duplicates import Duplicates
from headwater.data.examples import Block, MakeExamples, WriteExamples
from headwater.data.inputs import Inputs
from headwater.data.journal import Corpus
from headwater.data.modes import Mode, find_mode
from headwater.data.near_duplicates import KEPT_FILE, find_kept
from headwater.data.order import Indices
from headwater.data.packing import Encode, WriteSamples, arrange, split_samples
from headwater.data.raw_records import BadRecords
from headwater.data.record_check import RecordCheck
from headwater.data.saved_tokenizer import save_tokenizer
from headwater.data.settings import NearDuplicates, PrepareSettings
from headwater.data.split_files import SplitFiles
from headwater.data.staging import file_marks, staged_folder
from headwater.data.statistics import FILE_NAME, Statistics, entropy
from headwater.data.tokenizer import end_of_text_id, vocabulary_size
from headwater.data.workers import ordered_map

_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>")


def prepare(
    inputs: Sequence[Path],
    output_dir: Path,
    settings: PrepareSettings,
    *,
    num_workers: int = 1,
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
        settings: settings that determine the samples.
        num_workers: worker processes; 1 or less: work in this process.
        overwrite: replace prepared data that `output_dir` already holds.
        progress: show a progress bar.

    Returns:
        Figures of the prepared data.

    Raises:
        ConfigError: if a setting does not apply to the mode.
        DataError: if an input, the tokenizer or the output folder cannot be used.
    """
    # This comes first, because the key must change with the template in the tokenizer's folder.
    settings = settings.with_chat_template()
    files = find_inputs(inputs)
    mode = find_mode(settings.mode, settings.options)
    # `--overwrite` replaces only folders of prepared data. Any other folder that is not empty is refused.
    replace = overwrite and (output_dir / FILE_NAME).exists()
    key = _key(settings, files)
    try:
        with staged_folder(output_dir, replace=replace, key=key) as folder, _progress(progress) as bar:
            read = Inputs(files, mode.reads, settings.json_key, bar)
            if isinstance(settings.deduplicate, NearDuplicates):
                bad = BadRecords(settings.skip_bad_records)
                if mode.reads == "records":
                    read = dataclasses.replace(read, makes_example=RecordCheck(mode, settings.options))
                kept = find_kept(read, settings.deduplicate, bad, folder, num_workers)
                read = dataclasses.replace(read, kept=kept)
            written = SplitFiles(folder, settings.samples_per_file, num_workers, bar)
            statistics = _Preparation(settings, mode, read, written).run()
            (folder / KEPT_FILE).unlink(missing_ok=True)
            return statistics
    except OSError as error:
        remedy = (
            "make the folder writable, and free disk space (about 12 bytes per token are needed, and for "
            "--deduplicate_near 516 bytes per document)"
        )
        raise DataError(f"output cannot be written: {error}", where=str(output_dir), remedy=remedy) from error


def _key(settings: PrepareSettings, files: Sequence[Path]) -> str:
    """Return a text that identifies this preparation: it differs for other settings or changed inputs."""
    sources = [*files, *([settings.tokenizer] if isinstance(settings.tokenizer, Path) else [])]
    return json.dumps([settings.as_json(), file_marks(sources)])


@dataclasses.dataclass(frozen=True)
class _Written:
    """Counts of the second pass, which writes the sample files.

    Attributes:
        samples: number of samples by split.
        padding: padding positions of all samples.
    """

    samples: dict[str, int]
    padding: int = 0


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """A preparation that writes to a temporary folder, which is renamed when it is complete."""

    settings: PrepareSettings
    mode: Mode
    inputs: Inputs
    output: SplitFiles

    def run(self) -> Statistics:
        folder, skip_bad = self.output.folder, self.settings.skip_bad_records
        texts = self.inputs.texts(BadRecords(skip_bad), self._duplicates())
        tokenizer = save_tokenizer(folder, self.settings, self.mode, texts)
        end = end_of_text_id(tokenizer, self.settings.end_of_text)
        # These are new counters, because the training of a tokenizer has already counted the same records.
        bad, duplicates = BadRecords(skip_bad), self._duplicates()
        with contextlib.closing(Corpus(folder, vocabulary_size(tokenizer))) as corpus:
            if self._is_stream:
                self._first_pass(Encode(tokenizer.to_str(), end), corpus, bad, duplicates)
                written = self._write_windows(corpus)
            else:
                make = self._maker(tokenizer, end)
                self._first_pass(make, corpus, bad, duplicates)
                self._check_usable(corpus, bad)
                written = self._write_examples(make, corpus)
            corpus.remove()
            statistics = self._statistics(corpus, written, end, bad)
            left_out = duplicates.count + self.inputs.left_out
            statistics = dataclasses.replace(statistics, duplicate_records=left_out)
        # The statistics are written last: their presence means that all data are complete.
        statistics.write(folder)
        return statistics

    def _duplicates(self) -> Duplicates:
        return Duplicates(skip=self.settings.deduplicate is True)

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

    def _first_pass(
        self,
        work: Callable[[tuple[int, Sequence[Any]]], Block],
        corpus: Corpus,
        bad: BadRecords,
        duplicates: Duplicates,
    ) -> None:
        """Call `work` on each task of the inputs and add the result to `corpus`; skip tasks that it holds."""
        done = corpus.progress.tasks
        # Finished tasks are read again: `bad` and `duplicates`, which the journal does not save, need them.
        tasks = (task for task in self.inputs.tasks(bad, duplicates) if task[0] >= done)
        for block in ordered_map(work, tasks, self.output.num_workers):
            corpus.add(block)
        corpus.save()
        if corpus.progress.counts["documents"] == 0:
            remedy = "name files that are not empty"
            raise DataError("the inputs contain no text", where=self.inputs.names, remedy=remedy)

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
            where=self.inputs.names,
            remedy="; ".join(remedy for *_, remedy in found),
        )

    def _write_windows(self, corpus: Corpus) -> _Written:
        length = self.settings.sequence_length
        # One token is subtracted, because the last token of the stream is only a label.
        count = (corpus.progress.values - 1) // length
        splits = self._split(count)
        write = WriteSamples(corpus.values_path, length)
        return _Written(self.output.write(splits, lambda samples: samples, write, ".h5"))

    def _split(self, num_samples: int) -> dict[str, Indices]:
        settings = self.settings
        return split_samples(num_samples, settings.val_fraction, settings.seed, where=self.inputs.names)

    def _write_examples(self, make: MakeExamples, corpus: Corpus) -> _Written:
        mode, settings = self.mode, self.settings
        places, padding = arrange(
            corpus.lengths(), settings.sequence_length, mode.packing if mode.in_rows else None
        )
        splits = self._split(len(places))
        is_table = settings.options.dynamic_mask and settings.mode == "masked"
        suffix = ".txt" if mode.line is not None else ".csv" if is_table else ".h5"
        write = WriteExamples(corpus.values_path, make)
        return _Written(self.output.write(splits, places.take, write, suffix), padding)

    def _statistics(self, corpus: Corpus, written: _Written, end: int, bad: BadRecords) -> Statistics:
        progress, length = corpus.progress, self.settings.sequence_length
        counts, tokens = progress.counts, int(progress.token_counts.sum())
        positions = sum(written.samples.values()) * length
        joined = self.mode.packing == "joined"
        return Statistics(
            documents=counts["documents"],
            text_bytes=counts["text_bytes"],
            tokens=tokens,
            dropped_tokens=tokens - positions if self._is_stream else 0,
            bytes_per_token=counts["text_bytes"] / max(tokens, 1),
            unigram_entropy=entropy(progress.token_counts),
            vocab_size=len(progress.token_counts),
            end_of_text_id=end,
            sequence_length=length,
            train_samples=written.samples["train"],
            val_samples=written.samples["val"],
            tokenizer_file=TOKENIZER_FILE,
            settings={**self.settings.as_json(), "inputs": [path.name for path in self.inputs.files]},
            mode=self.settings.mode,
            loss_tokens=positions - written.padding if joined else counts["loss_tokens"],
            padding_tokens=written.padding,
            bad_records=bad.count + counts["bad"],
            empty_records=counts["empty"],
            too_long_records=counts["too_long"],
            cut_records=counts["cut"],
            images=counts["images"],
        )


def _progress(show: bool) -> Progress:
    columns = ("{task.description:>18}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not show)
