"""Any model of the transformers library, described by the `config.json` in a folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, FilePath, Section
from headwater.core.errors import ConfigError
from headwater.core.packages import importing

Task = Literal["causal_lm", "masked_lm", "seq2seq", "sequence_classification", "image_classification"]
"""The tasks for which a model can be trained; `AUTO_CLASSES` has the class of each in the library."""

CONFIG_FILE = "config.json"

AUTO_CLASSES: dict[Task, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


class HuggingFaceConfig(Section):
    """A model of the transformers library.

    Attributes:
        hf: a folder with `config.json`. Code in the folder is never run.
        weights: a folder with the initial weights, or `random`. If absent, the weights in `hf`, or random
            ones if it has no weights.
        task: task of the training; if absent, that of the class in `config.json`.
        sequence_length: tokens of the longest sample; if absent, the model's number of positions.
        freeze: regular expressions; parameters whose names one of them matches are not trained.
    """

    name: Literal["hf"]
    hf: FilePath
    weights: Literal["random"] | FilePath | None = None
    task: Task | None = None
    sequence_length: int | None = Field(default=None, ge=1)
    freeze: Annotated[tuple[str, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _has_config(self) -> Self:
        if not self.hf.is_dir():
            raise ValueError(f"the folder {self.hf} does not exist")
        if not (self.hf / CONFIG_FILE).is_file():
            raise ValueError(f"the folder {self.hf} has no {CONFIG_FILE}")
        return self

    @property
    def architecture(self) -> Any:
        """The transformers library's configuration object. It is shared: copy it before you change it.

        Raises:
            ConfigError: if `config.json` is damaged, or the library does not have its architecture.
        """
        path = self.hf / CONFIG_FILE
        stat = path.stat()
        return _read_config(self.hf, stat.st_mtime_ns, stat.st_size)

    @property
    def kind(self) -> Task:
        """The task of the training.

        Raises:
            ConfigError: if neither the section nor `config.json` names a supported task.
        """
        if self.task is not None:
            return self.task
        named = getattr(self.architecture, "architectures", None) or ()
        found = next((task for task in get_args(Task) if _classes(task).intersection(named)), None)
        if found is None:
            what = f"a {named[0]}" if named else "a model without the name of its class"
            raise ConfigError(
                f"{self.hf / CONFIG_FILE} describes {what}, from which the task cannot be determined",
                where="trainer.init.model.task",
                remedy=f"write one of {', '.join(get_args(Task))}",
            )
        return found  # type: ignore[no-any-return]

    @property
    def _text(self) -> Any:
        return self.architecture.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return int(self._text.vocab_size)

    source_tokens = target_tokens = vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of the longest sample."""
        return self.sequence_length or self._positions or _MANY_POSITIONS

    src_max_position_embeddings = tgt_max_position_embeddings = max_position_embeddings

    @property
    def example_length(self) -> int:
        """Number of tokens of a sample, for a plan that is made before there is data."""
        return self.sequence_length or self._positions or _USUAL_LENGTH

    @property
    def _positions(self) -> int | None:
        """The maximum number of tokens of a sample, or `None` if the model has no limit."""
        config = self._text
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        found = (getattr(config, name, None) for name in names)
        positions = next((each for each in found if isinstance(each, int) and each > 0), None)
        # In RoBERTa and similar models, positions start after the id of the padding token.
        if positions is not None and config.model_type in _SHIFTED_POSITIONS:
            return positions - int(config.pad_token_id) - 1
        return positions

    @property
    def num_segments(self) -> int:
        """Number of segments of a sample that the model distinguishes; 0 for none."""
        return int(getattr(self._text, "type_vocab_size", 0) or 0)

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token."""
        return int(getattr(self._text, "pad_token_id", None) or 0)

    disable_nsp: ClassVar[bool] = True
    """True: the library's masked language models do not predict the next sentence."""

    @property
    def num_labels(self) -> int:
        """Number of classes of the model."""
        return int(self.architecture.num_labels)

    num_classes = num_labels

    @property
    def num_channels(self) -> int:
        """Number of channels of images."""
        return int(getattr(self.architecture, "num_channels", 3))

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of images, for a plan that is made before there is data."""
        size = getattr(self.architecture, "image_size", None) or _USUAL_IMAGE_SIZE
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


_MANY_POSITIONS = 1 << 30
_USUAL_LENGTH = 2048
_USUAL_IMAGE_SIZE = 224
_SHIFTED_POSITIONS = frozenset(
    ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text")
)


# The file's time and size are part of the cache's key: a changed file is read again.
@functools.lru_cache(maxsize=4)
def _read_config(folder: Path, _modified_ns: int, _num_bytes: int) -> Any:
    from_pretrained = _library("AutoConfig").from_pretrained
    try:
        return from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # for a file that it cannot use, the library can raise any exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the transformers library cannot use this {CONFIG_FILE}: {lines[0][:300]}",
            where=str(folder / CONFIG_FILE),
            remedy="name the folder of a model whose model_type the installed transformers library supports; "
            "code in the folder is not run",
        ) from error


def auto_class(task: Task) -> Any:
    """Return the transformers library's `AutoModelFor…` class for a task."""
    return _library(AUTO_CLASSES[task])


@functools.cache
def _classes(task: Task) -> frozenset[str]:
    """Return the names of the library's model classes for a task."""
    found: set[str] = set()
    for names in auto_class(task)._model_mapping._model_mapping.values():
        found.update((names,) if isinstance(names, str) else names)
    return frozenset(found)


def _library(name: str) -> Any:
    with importing("a model of the transformers library", "hf"):
        import transformers
    return getattr(transformers, name)
