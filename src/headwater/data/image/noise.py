"""Images with random noise and timesteps, for the training of diffusion models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headwater.core.errors import DataError
from headwater.data.loader import Batch
from headwater.data.order import random_generator
from headwater.data.source import Samples


class NoisedImages:
    """A data set that adds noise, a timestep and a label dropout flag to each image.

    A batch has `inputs` and `noise`, fp32 [batch, channels, h, w]; `timesteps` and `labels`, int64 [batch];
    and `no_label`, bool [batch]. The images are not changed: the model mixes them with the noise.

    Args:
        images: data set whose batches have `inputs` and `labels`.
        shape: channels, height and width that the model reads.
        steps: number of timesteps; a timestep is in [0, steps).
        label_dropout: probability that a sample is trained without its label.
        seed: seed of the noise, timesteps and dropout.
    """

    sequence_length = None

    def __init__(
        self, images: Samples, shape: tuple[int, int, int], *, steps: int, label_dropout: float, seed: int
    ) -> None:
        self.images, self.shape = images, shape
        self._steps, self._label_dropout, self._seed = steps, label_dropout, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        batch = self.images.__getitems__(draws)
        if isinstance(batch, DataError):
            return batch
        found = tuple(batch["inputs"].shape[1:])
        if found != self.shape:
            return DataError(
                f"expected images of shape {list(self.shape)}, got {list(found)}",
                where="model.vae",
                remedy=f"set latent_channels to {found[0]} and latent_size to {list(found[1:])}",
            )
        noise, times, hidden = zip(*map(self._drawn, draws), strict=True)
        return batch | {
            "noise": torch.from_numpy(np.stack(noise)),
            "timesteps": torch.tensor(times),
            "no_label": torch.tensor(hidden),
        }

    def _drawn(self, draw: int) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], int, bool]:
        """Return the noise and timestep of a draw, and True if its label is dropped."""
        generator = random_generator(self._seed, "noise", draw)
        noise = generator.standard_normal(self.shape, dtype=np.float32)
        return noise, int(generator.integers(self._steps)), bool(generator.random() < self._label_dropout)
