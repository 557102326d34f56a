"""Examples on disk: the first pass makes them, the second writes them as samples in random order."""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.data.modes import Context, ModeOptions, Packing, find_mode
from headwater.data.modes.base import Example, Tokens, Unusable
from headwater.data.order import Indices
from headwater.data.sample_file import BLOCK_SAMPLES, CHANNELS, SPAN_CHANNELS, Samples, write_datasets
from headwater.data.staging import complete_file
from headwater.data.tokenizer import vocabulary_size

_ITEM = np.dtype(np.int32).itemsize


@dataclasses.dataclass(frozen=True)
class Block:
    """The examples made by one task.

    Attributes:
        values: the rows of all examples, concatenated.
        lengths: lengths of these rows, [examples, rows of an example].
        token_counts: how often each token occurs, [vocab_size].
        counts: number of documents, of records left out by reason, and so on.
    """

    values: Tokens
    lengths: Tokens
    token_counts: npt.NDArray[np.int64]
    counts: collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class MakeExamples:
    """First pass: turns a numbered task of pieces or records into a `Block`; runs in worker processes.

    Attributes:
        mode: name of the mode.
        options: options of the mode.
        tokenizer_json: content of the tokenizer.json.
        end: id of the end-of-text token.
        pad: id of the padding token.
        length: tokens per sample.
        seed: seed of all random choices.
        skip_bad: leave out and count records that cannot be used, instead of raising an error.
    """

    mode: str
    options: ModeOptions
    tokenizer_json: str
    end: int
    pad: int
    length: int
    seed: int
    skip_bad: bool = False

    @functools.cached_property
    def context(self) -> Context:
        """Settings, tokenizer and counters for the mode; created once per worker process."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        return Context(tokenizer, self.end, self.pad, self.length, self.options, self.seed)

    def __call__(self, task: tuple[int, Sequence[object]]) -> Block:
        number, items = task
        mode, context = find_mode(self.mode, self.options), self.context
        # The context lives as long as the worker, but a block counts only its own task.
        context.counts.clear()
        context.counts["documents"] = sum(getattr(item, "ends_document", True) for item in items)
        examples: list[Example] = []
        for made in mode.make(context, items, number):
            if isinstance(made, Unusable):
                context.counts[made.reason] += 1
            elif not isinstance(made, DataError):
                examples.append(made)
            elif self.skip_bad:
                context.counts["bad"] += 1
            else:
                raise made
        if mode.in_rows:
            # The first token of a text is never a label.
            context.counts["loss_tokens"] += sum(int(mask[1:].sum()) for _, mask in examples)
        rows = [row for example in examples for row in example]
        tokens = [row for example in examples for row in example[: mode.token_columns]]
        return Block(
            np.concatenate(rows) if rows else np.empty(0, dtype=np.int32),
            np.array([[len(row) for row in example] for example in examples], dtype=np.int32),
            np.bincount(np.concatenate(tokens), minlength=self._vocab_size)
            if tokens
            else np.zeros(self._vocab_size, dtype=np.int64),
            # The counters are copied, because without workers the next task in this process clears them.
            collections.Counter(context.counts),
        )

    @functools.cached_property
    def _vocab_size(self) -> int:
        return vocabulary_size(self.context.tokenizer)


@dataclasses.dataclass(frozen=True)
class Places:
    """Positions on disk of the examples of some samples.

    Attributes:
        numbers: numbers of the examples, [examples].
        starts: index of the first value of each example in the file of values, [examples].
        lengths: lengths of the rows of each example, [examples, rows of an example].
        ends: for each sample, the number of examples in it and all samples before it, [samples].
    """

    numbers: Indices
    starts: Indices
    lengths: Tokens
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def take(self, samples: Indices) -> Places:
        """Return the places of the examples of `samples`, sample by sample."""
        begins = np.concatenate([[0], self.ends[:-1]])
        members = [np.arange(begins[sample], self.ends[sample]) for sample in samples]
        chosen = np.concatenate(members) if members else np.empty(0, dtype=np.int64)
        return Places(
            self.numbers[chosen],
            self.starts[chosen],
            self.lengths[chosen],
            np.cumsum([len(member) for member in members], dtype=np.int64),
        )

    def read(self, descriptor: int) -> Iterator[list[tuple[int, Example]]]:
        """Yield for each sample the list of its examples, as pairs of the example's number and its rows.

        The file is read instead of memory-mapped, so that resident memory does not grow.
        """
        start = 0
        for end in self.ends:
            sample = []
            for place in range(start, end):
                lengths = self.lengths[place]
                data = os.pread(descriptor, _ITEM * int(lengths.sum()), _ITEM * int(self.starts[place]))
                values = np.frombuffer(data, dtype=np.int32)
                rows = tuple(np.split(values, np.cumsum(lengths[:-1])))
                sample.append((int(self.numbers[place]), rows))
            yield sample
            start = end


@dataclasses.dataclass(frozen=True)
class WriteExamples:
    """Second pass: writes samples to a file whose suffix decides its format; runs in worker processes.

    Attributes:
        values_path: file with the values of all examples.
        make: the first pass that made the examples.
    """

    values_path: Path
    make: MakeExamples

    def __call__(self, task: tuple[Path, Places]) -> int:
        path, places = task
        mode, context = find_mode(self.make.mode, self.make.options), self.make.context
        with self.values_path.open("rb") as values:
            samples = places.read(values.fileno())
            if mode.line is not None:
                _write_lines(path, [mode.line(example) for ((_, example),) in samples])
            elif mode.fields is not None:
                fields = (mode.fields(example, number, context) for ((number, example),) in samples)
                (_write_table if path.suffix == ".csv" else _write_fields)(path, fields, len(places))
            else:
                row = functools.partial(
                    sample_row, length=context.length, pad=context.pad, packing=mode.packing
                )
                rows = ({"data": row([example for _, example in sample])} for sample in samples)
                _write_fields(path, rows, len(places))
        return len(places)


def sample_row(examples: Sequence[Example], length: int, pad: int, packing: Packing) -> Samples:
    """Return one sample [channels, length] packed from examples.

    The label of a token is the token after it, so that a text of n tokens takes n - 1 positions.

    Args:
        examples: pairs of tokens and loss mask.
        length: tokens per sample.
        pad: id of the padding token.
        packing: "joined" concatenates the texts first; "apart" adds the channels that keep them apart.
    """
    if packing == "joined":
        examples = [tuple(np.concatenate(rows) for rows in zip(*examples, strict=True))]
    apart = packing == "apart"
    channels = SPAN_CHANNELS if apart else CHANNELS
    row = np.zeros((len(channels), length), dtype=np.int32)
    row[0] = row[2] = pad
    start = 0
    for tokens, mask in examples:
        count = len(tokens) - 1
        part = row[:, start : start + count]
        part[0], part[1], part[2] = tokens[:-1], mask[1:], tokens[1:]
        if apart:
            part[3], part[4] = np.arange(count - 1, -1, -1), np.arange(count)
        start += count
    return row


def _write_fields(path: Path, fields: Iterator[dict[str, Tokens]], count: int) -> None:
    def blocks() -> Iterator[dict[str, Tokens]]:
        held: list[dict[str, Tokens]] = []
        for number, sample in enumerate(fields, start=1):
            held.append(sample)
            if len(held) == BLOCK_SAMPLES or number == count:
                yield {name: np.stack([each[name] for each in held]) for name in held[0]}
                held.clear()

    write_datasets(path, blocks(), count)


def _write_table(path: Path, lines: Iterator[dict[str, object]], _count: int) -> None:
    with complete_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for line in lines:
            if writer is None:
                writer = csv.DictWriter(file, list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with complete_file(path) as partial:
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
