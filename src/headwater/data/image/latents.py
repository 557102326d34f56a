"""Latents: images encoded by an autoencoder, in one folder per class."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headwater.config.data import LatentDataConfig
from headwater.core.errors import DataError
from headwater.data.image.classes import find_classes
from headwater.data.loader import Batch
from headwater.data.order import random_generator

_REMEDY = "encode the images again, or remove the file"
_LOG_VARIANCES = (-30.0, 20.0)
"""Bounds of the log variances, the same as in the autoencoders of the diffusers library."""


class Latents:
    """A data set of latents with one class each.

    A batch has `inputs`, fp32 [batch, channels, h, w], and `labels`, int64 [batch].

    Args:
        variants: lists of files. All lists hold the same images in the same order, for example flipped; each
            draw reads a random one.
        labels: class of each image.
        shape: channels, height and width of a latent.
        scaling_factor: factor on each latent.
        seed: seed of the choice of variants and of the sampling from the encoded distributions.
    """

    sequence_length = None

    def __init__(
        self,
        variants: Sequence[Sequence[Path]],
        labels: Sequence[int],
        *,
        shape: tuple[int, int, int],
        scaling_factor: float,
        seed: int,
    ) -> None:
        self.variants = variants
        self.labels = np.asarray(labels, dtype=np.int64)
        self._shape, self._factor, self._seed = shape, scaling_factor, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            latents = np.stack([self._latent(draw) for draw in draws])
        except DataError as error:
            return error
        labels = self.labels[[draw % len(self) for draw in draws]]
        return {"inputs": torch.from_numpy(latents), "labels": torch.from_numpy(labels)}

    def _latent(self, draw: int) -> npt.NDArray[np.float32]:
        """Return a latent sampled from the normal distribution in its file (arXiv:1312.6114, section 2.4)."""
        generator = random_generator(self._seed, "latent", draw)
        files = self.variants[int(generator.integers(len(self.variants)))]
        means, log_variances = np.split(self._distribution(files[draw % len(self)]), 2)
        deviations = np.exp(0.5 * np.clip(log_variances, *_LOG_VARIANCES))
        noise = generator.standard_normal(self._shape, dtype=np.float32)
        latent: npt.NDArray[np.float32] = (means + deviations * noise) * np.float32(self._factor)
        return latent

    def _distribution(self, path: Path) -> npt.NDArray[np.float32]:
        try:
            # If `np.load` opened the file itself, it would not close a damaged archive.
            with path.open("rb") as content, np.load(content) as file:
                stored = np.asarray(file["vae_output"], dtype=np.float32)
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot read vae_output: {error}", where=str(path), remedy=_REMEDY) from error
        channels, *size = self._shape
        if stored.shape != (2 * channels, *size):
            raise DataError(
                f"expected vae_output of shape {[2 * channels, *size]}, got {list(stored.shape)}",
                where=str(path),
                remedy="set model.vae.latent_channels and latent_size to those of the data",
            )
        return stored


def read_latents(
    config: LatentDataConfig, *, shape: tuple[int, int, int], scaling_factor: float, num_classes: int
) -> Latents:
    """Return the data set that a section of a params file describes; classes follow the order of folders.

    Args:
        config: the section.
        shape: channels, height and width of a latent.
        scaling_factor: factor on each latent.
        num_classes: classes of the model.

    Raises:
        DataError: if no file is found, the folders have more classes than the model, or the folders in
            `data_dir` hold different files.
    """
    roots = [folder / config.split for folder in config.data_dir]
    found = [find_classes(root, lambda path: path.suffix == ".npz", num_classes) for root in roots]
    first, *others = (
        [path.relative_to(root) for path in files] for root, (files, _) in zip(roots, found, strict=True)
    )
    for root, names in zip(roots[1:], others, strict=True):
        if different := sorted(set(first).symmetric_difference(names)):
            raise DataError(
                f"{different[0]} is in only one of the two folders",
                where=f"{roots[0]} and {root}",
                remedy="use folders that hold the same images under the same names",
            )
    return Latents(
        [files for files, _ in found],
        found[0][1],
        shape=shape,
        scaling_factor=scaling_factor,
        seed=config.shuffle_seed or 0,
    )
