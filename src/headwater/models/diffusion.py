"""Diffusion: adds noise to images for training, and generates images with a model that predicts the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.config.models.diffusion import DiTConfig, NoiseSchedule
from headwater.core.errors import ConfigError
from headwater.core.packages import importing
from headwater.core.seeding import derive_seed

_LARGEST_BETA = 0.999


def noise_variances(schedule: NoiseSchedule, steps: int, *, device: torch.device | None = None) -> Tensor:
    """Return the variance of the noise that each step adds, the `beta` of the papers: [steps], fp64.

    Args:
        schedule: `linear`: from 1e-4 to 0.02 in 1000 steps (arXiv:2006.11239, section 4), scaled for another
            number of steps so that the total noise is about the same. `cosine`: arXiv:2102.09672, equation
            17.
        steps: number of steps.
        device: device of the result.
    """
    if schedule == "linear":
        factor = 1000 / steps
        first, last = (min(factor * end, _LARGEST_BETA) for end in (1e-4, 0.02))
        return torch.linspace(first, last, steps, device=device, dtype=torch.float64)
    times = torch.arange(steps + 1, device=device, dtype=torch.float64) / steps
    left = ((times + 0.008) / 1.008 * math.pi / 2).cos().square()
    return (1 - left[1:] / left[:-1]).clamp_max(_LARGEST_BETA)


def add_noise(images: Tensor, noise: Tensor, timesteps: Tensor, variances: Tensor) -> Tensor:
    """Return images after some noise steps (arXiv:2006.11239, equation 4), fp32 [batch, channels, h, w].

    Args:
        images: images without noise, [batch, channels, h, w].
        noise: standard normal noise of the same shape.
        timesteps: index of the last noise step of each image, [batch].
        variances: see `noise_variances`.
    """
    # In fp64 until after the product: hundreds of factors near 1 would lose digits in fp32.
    left = (1 - variances).cumprod(0)[timesteps][:, None, None, None]
    return left.sqrt().float() * images + (1 - left).sqrt().float() * noise


class Denoiser(Protocol):
    """A model that predicts noise: the interface that `generate_images` needs."""

    @property
    def config(self) -> DiTConfig: ...

    def predict_noise(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Return the predicted noise in `images`, of their shape.

        Args:
            images: noisy images, [batch, channels, h, w].
            timesteps: index of the last noise step of each image, [batch].
            labels: class of each image, [batch]; `num_classes` means no class.
        """
        ...


@torch.no_grad()
def generate_images(
    model: Denoiser, labels: Sequence[int], *, seed: int = 0, device: torch.device | None = None
) -> Tensor:
    """Generate latents of images with the sampler of the model's section.

    The same arguments produce the same latents.

    Args:
        model: the model, in eval mode.
        labels: class of each image.
        seed: seed of the random stream.
        device: device on which the model computes.

    Returns:
        Latents, fp32 [len(labels), channels, h, w], scaled by `vae.scaling_factor` as in training. Divide by
        it before the autoencoder decodes them.

    Raises:
        ConfigError: if a class is not below the model's `num_classes`, or the diffusers library is not
            installed.
    """
    config = model.config
    if any(not 0 <= label < config.num_classes for label in labels):
        raise ConfigError(
            f"expected classes in [0, {config.num_classes}), got {list(labels)}",
            where="labels",
            remedy="use classes of the data that the model was trained on",
        )
    sampler = _make_sampler(config)
    generator = torch.Generator().manual_seed(derive_seed(seed, "images"))
    images: Tensor = torch.randn(len(labels), *config.latent_shape, generator=generator)
    classes = torch.tensor(list(labels), device=device)
    for time in sampler.timesteps:
        noise = _guided(model, images.to(device), int(time), classes).cpu()
        # The sampler's noise is drawn on the CPU, so that images do not depend on the device.
        images = sampler.step(noise, int(time), images, generator=generator).prev_sample
    return images


def _guided(model: Denoiser, images: Tensor, time: int, labels: Tensor) -> Tensor:
    """Return the predicted noise with classifier-free guidance (arXiv:2207.12598)."""
    config, pipeline = model.config, model.config.reverse_process.pipeline
    timesteps = torch.full_like(labels, time)
    if pipeline.guidance_scale == 1:
        return model.predict_noise(images, timesteps, labels).float()
    no_class = torch.full_like(labels, config.num_classes)
    # One call for both, so that the weights are streamed once.
    both = torch.cat((labels, no_class))
    noises = model.predict_noise(images.repeat(2, 1, 1, 1), timesteps.repeat(2), both)
    given, free = noises.float().chunk(2)
    guided = slice(pipeline.num_cfg_channels)
    noise = given.clone()
    noise[:, guided] = free[:, guided] + pipeline.guidance_scale * (given - free)[:, guided]
    return noise


def _make_sampler(config: DiTConfig) -> Any:
    """Return the sampler of a model's section, from the diffusers library, with its timesteps set.

    Raises:
        ConfigError: if the library is not installed.
    """
    with importing("generating images", "diffusion"):
        from diffusers import DDIMScheduler, DDPMScheduler
    section = config.reverse_process.sampler
    steps = config.num_diffusion_steps
    common = {
        "num_train_timesteps": steps,
        "trained_betas": noise_variances(config.schedule_name, steps).tolist(),
        # Latents are not limited to [-1, 1], unlike pixels.
        "clip_sample": False,
        # "trailing" begins at the timestep of pure noise (arXiv:2305.08891, section 3.3).
        "timestep_spacing": "trailing",
    }
    sampler = (
        DDIMScheduler(**common)
        if section.name == "ddim"
        else DDPMScheduler(**common, variance_type=section.variance_type)
    )
    sampler.set_timesteps(section.num_inference_steps)
    return sampler
