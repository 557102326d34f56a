"""The modes of `headwater data`. A mode defines the inputs that it reads and the samples that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from headwater.core.errors import ConfigError
from headwater.data.modes.answers import chat, prompt_completion, summarization
from headwater.data.modes.base import Context, Example, Make, ModeOptions, of_records
from headwater.data.modes.classes import class_fields, labelled_text
from headwater.data.modes.documents import FIM_TOKENS, fill_in_the_middle, line_of, next_words, texts
from headwater.data.modes.images import image_fields, image_texts
from headwater.data.modes.masked import masked_fields, masked_pairs, masked_table
from headwater.data.modes.pairs import embedding_fields, embedding_pairs, preference, preference_fields
from headwater.data.modes.sentences import chosen_sentences, sentence_fields
from headwater.data.text.wordpiece import BEGIN, MASK, PAD, SEPARATOR

Packing = Literal["joined", "apart", "single"]
"""How a sample is filled: examples that see each other (joined) or do not (apart), or a single example."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One kind of training data, with the functions that make it.

    Attributes:
        reads: kind of the input: running text ("documents") or records with fields.
        make: makes examples of the input.
        token_columns: number of leading rows of an example that hold tokens, for the statistics; `None`: all.
        fields: makes the fields of a sample; `None`: samples are rows of tokens, loss mask and labels.
        line: makes the line of a sample in a text file; `None`: samples are not lines.
        packing: packing of rows, unless `use_vsl` is set.
        needed_tokens: tokens that the tokenizer must have.
        added_tokens: tokens that are added to the tokenizer, unless it has one of them.
        needed_options: options that must be set, because they have no default.
    """

    reads: Literal["documents", "records"]
    make: Make
    token_columns: int | None = 1
    fields: Callable[[Example, int, Context], dict[str, Any]] | None = None
    line: Callable[[Example], str] | None = None
    packing: Packing = "single"
    needed_tokens: tuple[str, ...] = ()
    added_tokens: tuple[str, ...] = ()
    needed_options: tuple[str, ...] = ()

    @property
    def in_rows(self) -> bool:
        """True if a sample has rows of tokens, loss mask and labels, instead of named fields or a line."""
        return self.fields is None and self.line is None


MODES = {
    "pretraining": Mode("documents", next_words, packing="joined"),
    "fill_in_the_middle": Mode(
        "documents",
        fill_in_the_middle,
        packing="joined",
        added_tokens=FIM_TOKENS,
    ),
    "masked": Mode(
        "documents",
        masked_pairs,
        fields=masked_fields,
        needed_tokens=(PAD, BEGIN, SEPARATOR, MASK),
    ),
    "span_corruption": Mode("documents", texts, line=line_of),
    "prompt_completion": Mode("records", of_records(prompt_completion)),
    "chat": Mode("records", of_records(chat)),
    "summarization": Mode("records", of_records(summarization)),
    "classification": Mode("records", of_records(labelled_text), fields=class_fields),
    "preference": Mode(
        "records",
        of_records(preference),
        token_columns=None,
        fields=preference_fields,
    ),
    "embedding_pairs": Mode(
        "records",
        of_records(embedding_pairs),
        token_columns=None,
        fields=embedding_fields,
    ),
    "extractive_summarization": Mode(
        "records",
        of_records(chosen_sentences),
        fields=sentence_fields,
        added_tokens=(PAD, BEGIN, SEPARATOR),
    ),
    "image_text": Mode(
        "records",
        image_texts,
        fields=image_fields,
        needed_options=("image_dir", "num_features"),
    ),
}
"""All modes by name."""


def find_mode(name: str, options: ModeOptions) -> Mode:
    """Return the mode of this name, adapted to the options.

    Raises:
        ConfigError: if the name is unknown, or an option is missing or does not apply to the mode.
    """
    if name not in MODES:
        remedy = f"use one of {', '.join(MODES)}"
        raise ConfigError(f"unknown mode {name!r}", where="mode", remedy=remedy)
    mode = MODES[name]
    if options.use_vsl and not mode.in_rows:
        remedy = f"remove use_vsl, or use one of {', '.join(n for n, m in MODES.items() if m.in_rows)}"
        raise ConfigError(f"mode {name} does not pack samples", where="use_vsl", remedy=remedy)
    missing = [f"--{key}" for key in mode.needed_options if getattr(options, key) is None]
    if missing:
        remedy = f"add {' and '.join(missing)}; see headwater data --help"
        raise ConfigError(f"mode {name} needs {' and '.join(missing)}", where="mode", remedy=remedy)
    if options.dynamic_mask and mode.fields is masked_fields:
        return dataclasses.replace(mode, fields=masked_table)
    return dataclasses.replace(mode, packing="apart") if options.use_vsl else mode


__all__ = ["MODES", "Context", "Mode", "ModeOptions", "Packing", "find_mode"]
