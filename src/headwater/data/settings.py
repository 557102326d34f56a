"""Settings of a preparation of training data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError
from headwater.data.modes import ModeOptions
from headwater.data.modes.chat import find_template
from headwater.data.tokenizer import TrainBPE

MAX_NGRAM = 1000
"""Maximum characters of an n-gram, because each character of a text begins one."""


@dataclasses.dataclass(frozen=True)
class NearDuplicates:
    """Settings of the search for near-duplicates. The defaults are those of SlimPajama.

    Attributes:
        threshold: Jaccard similarity of the n-grams of two documents from which they are near-duplicates.
        ngram: characters of an n-gram.

    Raises:
        ConfigError: if a setting is out of range.
    """

    threshold: float = 0.8
    ngram: int = 13

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            what = f"expected near_threshold in (0, 1], got {self.threshold}"
            raise ConfigError(what, where="near_threshold", remedy="use a similarity such as 0.8")
        if not 1 <= self.ngram <= MAX_NGRAM:
            what = f"expected near_ngram from 1 to {MAX_NGRAM}, got {self.ngram}"
            raise ConfigError(what, where="near_ngram", remedy="use a number of characters such as 13")


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """Settings of a preparation. Together with the inputs they determine every byte of the output.

    Attributes:
        tokenizer: `TrainBPE` to train a tokenizer, or the path of a tokenizer (see `load_tokenizer`).
        sequence_length: tokens per sample.
        val_fraction: fraction of the samples that go to `val/`; at least one sample unless it is 0.
        seed: seed of the order of the samples, of the split, and of the random choices of the mode.
        samples_per_file: samples in each file except the last.
        json_key: key of the text in records, in modes that read running text.
        end_of_text: token after each document; by default the end-of-text token of the tokenizer.
        mode: kind of the samples, a name in `headwater.data.modes.MODES`.
        options: options of the mode.
        deduplicate: leave out documents or records that are equal to an earlier one, apart from white space
            and upper and lower case; with `NearDuplicates` also those that are similar to another one.
        skip_bad_records: leave out and count records that cannot be used; otherwise the first is an error.

    Raises:
        ConfigError: if a setting is out of range.
    """

    tokenizer: Path | TrainBPE
    sequence_length: int
    val_fraction: float = 0.05
    seed: int = 0
    samples_per_file: int = 8192
    json_key: str = "text"
    end_of_text: str | None = None
    mode: str = "pretraining"
    options: ModeOptions = dataclasses.field(default_factory=ModeOptions)
    deduplicate: bool | NearDuplicates = False
    skip_bad_records: bool = False

    def __post_init__(self) -> None:
        for key in ("sequence_length", "samples_per_file"):
            if getattr(self, key) < 1:
                what = f"expected {key} of at least 1, got {getattr(self, key)}"
                raise ConfigError(what, where=key, remedy="use 1 or more")
        if not 0 <= self.val_fraction < 1:
            what = f"expected val_fraction in [0, 1), got {self.val_fraction}"
            remedy = "use a fraction such as 0.05, or 0 for no validation data"
            raise ConfigError(what, where="val_fraction", remedy=remedy)

    def with_chat_template(self) -> PrepareSettings:
        """Return the settings with the tokenizer's chat template, if the mode needs one and none is set."""
        if self.mode not in ("chat", "preference") or self.options.chat_template:
            return self
        template = find_template(self.tokenizer if isinstance(self.tokenizer, Path) else None)
        options = dataclasses.replace(self.options, chat_template=template)
        return dataclasses.replace(self, options=options)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain values. Paths are reduced to file names.

        The output therefore does not depend on the folders of the inputs.
        """
        settings = json.dumps(dataclasses.asdict(self), default=lambda path: path.name)
        plain: dict[str, Any] = json.loads(settings)
        return plain
