"""The diffusion transformer (DiT): predicts the noise in a latent image from its patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import InitializerConfig
from headwater.config.models.diffusion import DiTConfig
from headwater.core.dry_run import costs_by_shapes
from headwater.models.diffusion import add_noise, noise_variances
from headwater.models.layers.attention import AttentionContext, SelfAttention
from headwater.models.layers.feed_forward import NONLINEARITIES, FeedForward
from headwater.models.layers.initializers import draw, first_match, initialize
from headwater.models.layers.linear import Embedding, Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.layers.positions import rotary_frequencies, rotations, sinusoidal_grid
from headwater.models.vit import LearnedPositions, PatchEmbedding


class TimeEmbedding(nn.Module):
    """Embedding of timesteps: [batch] -> [batch, hidden].

    Its input is `frequency_embedding_size` cosines and sines of the timestep (arXiv:2212.09748, section 3.2).

    Args:
        config: the model section of a params file.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.size = config.frequency_embedding_size
        self.input = Linear(self.size, config.hidden_size)
        self.nonlinearity = NONLINEARITIES[config.embedding_nonlinearity]
        self.output = Linear(config.hidden_size, config.hidden_size)

    def forward(self, timesteps: Tensor) -> Tensor:
        frequencies = rotary_frequencies(self.size, 10000.0, device=timesteps.device)
        waves = torch.cat(rotations(timesteps, frequencies), dim=-1)
        return self.output(self.nonlinearity(self.input(waves.to(self.input.weight.dtype))))  # type: ignore[no-any-return]


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return tokens [batch, n, hidden] times (1 + `scale`) plus `shift`, both [batch, 1, hidden]."""
    return x * (1 + scale) + shift


@costs_by_shapes
class AdaptiveBlock(nn.Module):
    """A transformer block with adaLN-Zero: a vector per image modulates its norms and outputs.

    [batch, n, hidden] -> same shape (arXiv:2212.09748, section 3.2).

    Args:
        config: the model section of a params file.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.modulation = Linear(width, 6 * width)
        self.attention_norm = LayerNorm(width, epsilon, elementwise_affine=False)
        self.attention = SelfAttention(
            width,
            config.num_heads,
            scale=config.attention_scale,
            projection_bias=config.use_projection_bias_in_attention,
            output_bias=config.use_ffn_bias_in_attention,
            attention_dropout=config.attention_dropout,
            output_dropout=config.dropout_rate,
        )
        self.ffn_norm = LayerNorm(width, epsilon, elementwise_affine=False)
        self.ffn = FeedForward(
            width,
            config.filter_size,
            config.encoder_nonlinearity,
            bias=config.use_ffn_bias,
            dropout=config.dropout_rate,
        )

    def forward(self, x: Tensor, condition: Tensor, seen: AttentionContext) -> Tensor:
        """Return the tokens `x` [batch, n, hidden] after this block; `condition` is [batch, hidden]."""
        vectors = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        attention_shift, attention_scale, attention_gate, ffn_shift, ffn_scale, ffn_gate = vectors
        attended = self.attention(_modulated(self.attention_norm(x), attention_shift, attention_scale), seen)
        x = x + attention_gate * attended
        return x + ffn_gate * self.ffn(_modulated(self.ffn_norm(x), ffn_shift, ffn_scale))  # type: ignore[no-any-return]


class NoiseHead(nn.Module):
    """The output layer, which turns tokens into an image: [batch, n, hidden] -> [batch, channels, h, w].

    Args:
        config: the model section of a params file.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, (height, breadth) = config.hidden_size, config.patch_size
        self.modulation = Linear(width, 2 * width)
        self.norm = LayerNorm(width, config.layer_norm_epsilon, elementwise_affine=False)
        self.output = Linear(width, height * breadth * config.vae.latent_channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        patches = self.output(_modulated(self.norm(x), shift, scale))
        # [batch, rows, columns, patch height, patch width, channels]
        pixels = patches.unflatten(1, self.config.grid).unflatten(3, (*self.config.patch_size, -1))
        return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)  # type: ignore[no-any-return]


class DiT(nn.Module):
    """A diffusion transformer. `forward` returns the training loss.

    It predicts the noise in an image, given the image's class and timestep.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: DiTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patches = PatchEmbedding(config.vae.latent_channels, config.patch_size, width, bias=True)
        rows, columns = config.grid
        learned = config.position_embedding_type == "learned"
        self.positions = LearnedPositions(rows * columns, width) if learned else None
        self.embedding_dropout = nn.Dropout(config.embedding_dropout_rate)
        self.time_embedding = TimeEmbedding(config)
        # With label dropout there is one more embedding, for "no class".
        self.label_embedding = Embedding(config.num_classes + bool(config.label_dropout_rate), width)
        self.blocks = nn.ModuleList(AdaptiveBlock(config) for _ in range(config.num_hidden_layers))
        self.head = NoiseHead(config)
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        It is the mean squared error of the noise (arXiv:2006.11239, equation 14).

        Args:
            batch: `inputs` [batch, channels, h, w], the latents; `noise`, standard normal, of the same shape;
                `timesteps` [batch]; `labels` [batch]; `no_label` [batch], True for a sample that is trained
                without its class.
        """
        config, timesteps, labels = self.config, batch["timesteps"].long(), batch["labels"].long()
        if self.training and config.label_dropout_rate:
            labels = torch.where(batch["no_label"].bool(), config.num_classes, labels)
        variances = noise_variances(config.schedule_name, config.num_diffusion_steps, device=labels.device)
        images = add_noise(batch["inputs"], batch["noise"], timesteps, variances)
        return F.mse_loss(self.predict_noise(images, timesteps, labels).float(), batch["noise"].float())

    def predict_noise(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Return the predicted noise in `images`, of their shape.

        Args:
            images: noisy images, [batch, channels, h, w].
            timesteps: index of the last noise step of each image, [batch].
            labels: class of each image, [batch]; `num_classes` means no class.
        """
        x = self.patches(images)
        if self.positions is not None:
            x = self.positions(x)
        elif self.config.position_embedding_type == "fixed":
            x = x + sinusoidal_grid(*self.config.grid, self.config.hidden_size, device=x.device).to(x.dtype)
        x = self.embedding_dropout(x)
        condition = self.time_embedding(timesteps) + self.label_embedding(labels)
        condition = NONLINEARITIES[self.config.embedding_nonlinearity](condition)
        seen = AttentionContext(causal=False)
        for block in self.blocks:
            x = block(x, condition, seen)
        return self.head(x, condition)  # type: ignore[no-any-return]


def init_parameter(name: str, shape: Sequence[int], config: DiTConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone.

    The modulations and the last layer begin with zeros, so that each block is the identity at first
    (arXiv:2212.09748, section 3.2).
    """
    kinds = (
        (r".*\bbias|.*\bmodulation\.weight|head\.output\.weight", InitializerConfig(name="zeros")),
        (
            r"(label_embedding|positions|time_embedding\.\w+)\.weight",
            InitializerConfig(name="normal", std=config.initializer_range),
        ),
    )
    initializer = first_match(name, kinds) or config.matrix_init
    rows = (config.hidden_size,) * 3 if name.endswith(".qkv.weight") else ()
    return draw(name, shape, initializer, seed, rows=rows)
