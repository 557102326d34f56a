"""Sizes of a family: the numbers of a model's table row, read from its params file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from headwater.config.models.decoder import DecoderConfig
from headwater.config.run import RunConfig, load_params
from headwater.core.errors import ConfigError
from headwater.scaling.compute import training_flops
from headwater.trainer.zoo_job import count_parameters, fit_section


@dataclasses.dataclass(frozen=True)
class Size:
    """A model of a family, and its training.

    Attributes:
        name: name of its params file.
        params: its params file.
        model_dir: folder of its run.
        model: the section of the model.
        parameters: number of its parameters.
        learning_rate: highest learning rate of the run.
        batch_size: samples of a step.
        steps: steps of the run.
    """

    name: str
    params: Path
    model_dir: Path
    model: DecoderConfig
    parameters: int
    learning_rate: float
    batch_size: int
    steps: int

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self.model.max_position_embeddings

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.batch_tokens

    @property
    def flops(self) -> float:
        """FLOPs of the run; see `training_flops`."""
        return training_flops(self.model, self.sequence_length, self.tokens)


def size_of(config: RunConfig) -> Size:
    """Return the size that a run trains.

    Raises:
        ConfigError: if the model is not a decoder, the run has no training data, or its length is not set by
            max_steps.
    """
    model, steps = decoder_of(config), config.init.loop.max_steps
    batch_size = fit_section(config).train_dataloader.batch_size
    if steps is None:
        raise ConfigError(
            "expected a run whose length is known without its data, found no max_steps",
            where=f"{config.source}: trainer.init.loop",
            remedy="write max_steps",
        )
    schedule = config.init.schedule
    return Size(
        name=config.source.stem,
        params=config.source,
        model_dir=config.init.model_dir,
        model=model,
        parameters=count_parameters(model),
        learning_rate=max(schedule.value(step) for step in range(steps)),
        batch_size=batch_size,
        steps=steps,
    )


def read_sizes(files: Iterable[Path]) -> list[Size]:
    """Return the sizes of params files, by increasing compute."""
    return sorted((size_of(load_params(file)) for file in files), key=lambda size: size.flops)


def read_family(folder: Path) -> list[Size]:
    """Return the sizes of all params files in a folder, by increasing compute.

    Raises:
        ConfigError: if the folder has no params files.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(
            "expected the folder of a family, found no params files",
            where=str(folder),
            remedy="write them with headwater scaling write",
        )
    return read_sizes(files)


def decoder_of(config: RunConfig) -> DecoderConfig:
    """Return the model of a run.

    Raises:
        ConfigError: if it is not a decoder.
    """
    model = config.init.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(
            f"expected a decoder, such as gpt2 or llama, got {model.name}",
            where=f"{config.source}: trainer.init.model.name",
            remedy="name a params file of a decoder",
        )
    return model
