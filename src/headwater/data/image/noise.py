"""Images with the noise that a model is to find in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.data.loader import Batch
from headwater.data.source import Samples


class NoisedImages:
    """Images with noise, how much of it is to be in them, and whether their class is not to be known.

    A batch is `inputs`, `noise` [batch, channels, h, w], `timesteps`, `labels` and `no_label` [batch]. The
    images themselves are left as they are: what noise does to them is the model's to say.

    Args:
        images: batches of `inputs` and `labels`.
        shape: channels, height and width that the model takes.
        steps: timesteps lie below this.
        label_dropout: share of samples whose class is not to be known in training.
        seed: of all of this.
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
        """The batch of these samples; see `headwater.data.source.Samples`."""
        batch = self.images.__getitems__(draws)
        if isinstance(batch, DataError):
            return batch
        found = tuple(batch["inputs"].shape[1:])
        if found != self.shape:
            return DataError(
                f"images have shape {list(found)}, the model takes {list(self.shape)}",
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
        """Noise, timestep, and whether the class is not to be known."""
        generator = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, "noise", draw)))
        noise = generator.standard_normal(self.shape, dtype=np.float32)
        return noise, int(generator.integers(self._steps)), bool(generator.random() < self._label_dropout)
