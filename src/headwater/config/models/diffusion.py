"""Diffusion models, which generate images from noise."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Reads, Section
from headwater.config.models.common import (
    ConvolvedPatches,
    InitializerConfig,
    Nonlinearity,
    Rate,
    SoftmaxInFP32,
    attention_scale,
    check_heads,
    first_given,
)
from headwater.config.models.vision import Size

NoiseSchedule = Literal["linear", "cosine"]
_DECODER_ONLY = NoEffect("images are encoded before training, by an autoencoder of the diffusers library")


class AutoencoderConfig(Section):
    """The latents that the model generates, and the autoencoder that encoded the images to latents.

    Attributes:
        latent_size: height and width of the latents.
        latent_channels: number of channels of the latents.
        scaling_factor: factor on the latents, which makes their variance about 1 (arXiv:2112.10752, section
            G).
    """

    latent_size: Size = (32, 32)
    latent_channels: int = Field(default=4, ge=1)
    scaling_factor: float = Field(default=0.18215, gt=0)
    down_block_types: Annotated[Any, _DECODER_ONLY] = None
    up_block_types: Annotated[Any, _DECODER_ONLY] = None
    block_out_channels: Annotated[Any, _DECODER_ONLY] = None
    layers_per_block: Annotated[Any, _DECODER_ONLY] = None
    act_fn: Annotated[Any, _DECODER_ONLY] = None
    norm_num_groups: Annotated[Any, _DECODER_ONLY] = None
    sample_size: Annotated[Any, _DECODER_ONLY] = None
    in_channels: Annotated[Any, _DECODER_ONLY] = None
    out_channels: Annotated[Any, _DECODER_ONLY] = None


class SamplerConfig(Section):
    """The sampler, which converts noise to an image.

    Attributes:
        name: `ddpm` adds noise in each step (arXiv:2006.11239, algorithm 2); `ddim` does not
            (arXiv:2010.02502, equation 12).
        num_inference_steps: number of steps from noise to image. If it is smaller than in training, steps are
            skipped.
        variance_type: variance of the noise that `ddpm` adds: the smaller or the larger bound
            (arXiv:2006.11239, section 3.2).
    """

    name: Literal["ddpm", "ddim"] = "ddpm"
    num_inference_steps: int = Field(default=250, ge=1)
    variance_type: Literal["fixed_small", "fixed_large"] = "fixed_small"
    beta_start: Annotated[Any, NoEffect("the schedule of the training is used")] = None
    beta_end: Annotated[Any, NoEffect("the schedule of the training is used")] = None
    num_diffusion_steps: Annotated[Any, NoEffect("the value of the model is used")] = None


Labels = Annotated[
    tuple[int, ...] | None,
    AsTuple,
    Reads(
        lambda value: None if value == "None" else value,
        lambda schema: {"anyOf": [schema, {"const": "None"}]},
    ),
]
"""Classes. The text `None` is accepted for null, because YAML reads it as text."""


class PipelineConfig(Section):
    """The settings of the generated images.

    Attributes:
        guidance_scale: weight of classifier-free guidance, 1 + w in arXiv:2207.12598, equation 6; 1 for no
            guidance.
        num_cfg_channels: number of first channels to which guidance is applied; all if absent.
        custom_labels: classes of the images to generate; random classes if absent.
    """

    guidance_scale: float = Field(default=1.0, ge=1)
    num_cfg_channels: int | None = Field(default=None, ge=1)
    custom_labels: Labels = None
    num_classes: Annotated[Any, NoEffect("the value of the model is used")] = None


class ReverseProcessConfig(Section):
    """The generation of images with a trained model."""

    sampler: SamplerConfig = SamplerConfig()
    pipeline: PipelineConfig = PipelineConfig()


class DiTConfig(Section):
    """A diffusion transformer, which predicts the noise in a latent (arXiv:2212.09748, adaLN-Zero).

    Attributes:
        num_diffusion_steps: number of steps from an image to noise.
        schedule_name: noise schedule: `linear` (arXiv:2006.11239, section 4) or `cosine` (arXiv:2102.09672,
            equation 17).
        num_classes: number of classes of the images.
        patch_size: rows and columns of latent values that form one position.
        label_dropout_rate: fraction of the images that are trained without their class.
        embedding_nonlinearity: nonlinearity in the time embedding, and before each modulation.
        frequency_embedding_size: number of sines and cosines of the time.
        position_embedding_type: `fixed` for sines and cosines of row and column, `learned`, or null for none.
        attention_type: `dot_product` does not divide scores by the square root of the head size.
        use_ffn_bias_in_attention: add a bias to the attention's output.
        initializer_range: standard deviation of the embeddings of time and class.
        initializer: initializer of the other matrices, except those that start at zero; Xavier uniform if
            absent.
        vae: the latents.
        reverse_process: the generation of images.
    """

    name: Literal["dit"]
    num_diffusion_steps: int = Field(default=1000, ge=1)
    schedule_name: NoiseSchedule = "linear"
    num_classes: int = Field(default=1000, ge=1)
    label_dropout_rate: Rate = 0.1

    patch_size: Size = (2, 2)
    use_conv_patchified_embedding: ConvolvedPatches = False
    embedding_dropout_rate: Rate = 0.0
    embedding_nonlinearity: Nonlinearity = "silu"
    position_embedding_type: Literal["fixed", "learned"] | None = "fixed"
    frequency_embedding_size: int = Field(default=256, ge=2, multiple_of=2)

    hidden_size: int = Field(default=1152, ge=4)
    num_hidden_layers: int = Field(default=28, ge=1)
    num_heads: int = Field(default=16, ge=1)
    filter_size: int = Field(default=4608, ge=1)
    encoder_nonlinearity: Nonlinearity = "gelu"
    norm_first: Literal[True] = True
    layer_norm_epsilon: float = Field(default=1e-6, gt=0)
    dropout_rate: Rate = 0.0
    attention_dropout_rate: Rate | None = None
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_softmax_fp32: SoftmaxInFP32 = True
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    use_ffn_bias: bool = True
    initializer_range: float = Field(default=0.02, gt=0)
    initializer: InitializerConfig | None = None

    vae: AutoencoderConfig = AutoencoderConfig()
    reverse_process: ReverseProcessConfig = ReverseProcessConfig()

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        check_heads(self.hidden_size, self.num_heads)
        if self.position_embedding_type == "fixed" and self.hidden_size % 4:
            raise ValueError(
                f"fixed positions need hidden_size to be a multiple of 4, found {self.hidden_size}"
            )
        sizes = (*self.vae.latent_size, *self.patch_size)
        if min(sizes) < 1 or any(
            size % patch for size, patch in zip(self.vae.latent_size, self.patch_size, strict=True)
        ):
            raise ValueError(
                f"vae.latent_size {list(self.vae.latent_size)} is not a multiple of patch_size "
                f"{list(self.patch_size)}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        steps = self.reverse_process.sampler.num_inference_steps
        if steps > self.num_diffusion_steps:
            raise ValueError(
                "expected reverse_process.sampler.num_inference_steps <= num_diffusion_steps, "
                f"found {steps} and {self.num_diffusion_steps}"
            )
        if self.reverse_process.pipeline.guidance_scale > 1 and not self.label_dropout_rate:
            raise ValueError("reverse_process.pipeline.guidance_scale > 1 needs label_dropout_rate > 0")
        labels = self.reverse_process.pipeline.custom_labels or ()
        if any(not 0 <= label < self.num_classes for label in labels):
            raise ValueError(
                "expected reverse_process.pipeline.custom_labels >= 0 and < num_classes "
                f"({self.num_classes}), found {list(labels)}"
            )
        return self

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents."""
        return self.vae.latent_channels, *self.vae.latent_size

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of rows and columns of patches."""
        (height, width), (patch_height, patch_width) = self.vae.latent_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        return attention_scale(self.attention_type, self.hidden_size // self.num_heads)

    @property
    def attention_dropout(self) -> float:
        return first_given(self.attention_dropout_rate, self.dropout_rate)

    @property
    def matrix_init(self) -> InitializerConfig:
        """Initializer of matrices, except embeddings and matrices that start at zero."""
        return self.initializer or InitializerConfig(name="xavier_uniform")
