"""DINOv2: self-supervised learning with a student and a teacher, the moving average of the student.

The student learns to predict the teacher's outputs for other views of the same image.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import InitializerConfig
from headwater.config.models.self_supervised import (
    CalledSection,
    DinoConfig,
    DinoHeadConfig,
    InterpolationConfig,
    ViewEncoderConfig,
    source_of,
)
from headwater.models.dino_losses import make_loss
from headwater.models.encoder import EncoderBlock
from headwater.models.layers.attention import AttentionContext
from headwater.models.layers.initializers import BIASES_AND_NORMS, draw, first_match, initialize
from headwater.models.layers.linear import Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.vit import ClassToken, PatchEmbedding


class MaskToken(nn.Module):
    """Layer that replaces masked patches by a trained vector: [views, n, hidden] -> same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, masks: Tensor) -> Tensor:
        return torch.where(masks.unsqueeze(-1), self.weight.to(x.dtype), x)


class GridPositions(nn.Module):
    """Layer that adds a trained vector for each position: [views, 1 + n, hidden] -> same shape.

    For views with another number of patches the vectors are interpolated.

    Args:
        config: section of the encoder.
    """

    def __init__(self, config: ViewEncoderConfig) -> None:
        super().__init__()
        self.grid = tuple(s // p for s, p in zip(config.image_size, config.patch_size, strict=True))
        self.interpolation = config.interpolate_position_embedding
        self.weight = nn.Parameter(torch.empty(1 + config.num_patches, config.hidden_size))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return `x` plus the position vectors of a class token and of `grid` (rows, columns) of patches."""
        positions: Tensor = self.weight
        if grid != self.grid:
            positions = torch.cat((positions[:1], self._interpolated(positions[1:].float(), grid)))
        return x + positions.to(x.dtype)

    def _interpolated(self, places: Tensor, grid: tuple[int, int]) -> Tensor:
        """Interpolate position vectors to another grid: [rows * columns, hidden], bicubic as in DINOv2."""
        rows, columns = (
            _bicubic(old, new, self.interpolation, places.device)
            for old, new in zip(self.grid, grid, strict=True)
        )
        image = places.unflatten(0, self.grid).permute(2, 0, 1)
        # As matrix products in fp32: torch's backward of `interpolate` is not deterministic on a GPU.
        with torch.autocast(places.device.type, enabled=False):
            found: Tensor = rows @ image @ columns.t()
        return found.flatten(1).t()


def _bicubic(old: int, new: int, config: InterpolationConfig, device: torch.device) -> Tensor:
    """Return the matrix that interpolates `old` values to `new` along one axis: fp32 [new, old].

    Bicubic interpolation of an image is a product with such a matrix along each axis.
    """
    # Two equal columns of pixels for each value: for one column torch's kernel with antialiasing is wrong.
    each = torch.eye(old, device=device).view(1, old, old, 1).expand(-1, -1, -1, 2)
    # As in DINOv2: the scale is computed from the sizes plus the offset, which moves the sampled points.
    offset = config.interpolate_offset
    size = {"scale_factor": ((new + offset) / old, 1.0)} if offset else {"size": (new, 2)}
    found = F.interpolate(each, mode="bicubic", antialias=config.antialias, **size)
    return found[0, :, :, 0].t()


class ViewEncoder(nn.Module):
    """An encoder of all views of a batch of images.

    Args:
        config: section of the encoder.
    """

    def __init__(self, config: ViewEncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patches = PatchEmbedding(
            config.num_channels, config.patch_size, width, bias=config.use_embed_proj_bias
        )
        self.mask_token = MaskToken(width) if config.use_masked_patches else None
        self.class_token = ClassToken(width)
        self.positions = GridPositions(config)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout_rate)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                config,
                projection_bias=config.use_projection_bias_in_attention,
                attention_bias=config.use_ffn_bias_in_attention,
                ffn_bias=config.use_ffn_bias,
                layer_scale=config.layerscale_value is not None,
                stochastic_depth=config.drop_rate(number),
            )
            for number in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(width, config.layer_norm_epsilon)

    def forward(
        self, views: Tensor, unused: None = None, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all views.

        Args:
            views: the views, [batch, views, channels, h, w].
            unused: placeholder; params files pass `null` for it.
            masks: [batch, views, n], True for a masked patch.

        Returns:
            Hidden states of the patches [batch, views, n, hidden], and of the class token
            [batch, views, hidden].
        """
        height, width = self.config.patch_size
        grid = views.shape[3] // height, views.shape[4] // width
        x = self.patches(views.flatten(0, 1))
        if masks is not None and self.mask_token is not None:
            x = self.mask_token(x, masks.bool().flatten(0, 1))
        x = self.embedding_dropout(self.positions(self.class_token(x), grid))
        seen = AttentionContext(causal=False)
        for block in self.blocks:
            x = block(x, seen)
        x = self.norm(x).unflatten(0, views.shape[:2])
        return x[:, :, 1:], x[:, :, 0]


class Prototypes(nn.Module):
    """Products with unit vectors, the prototypes: [..., width] -> [..., prototypes].

    Args:
        width: elements of a prototype.
        count: number of prototypes.
        scaled: learn a length for each prototype.
    """

    def __init__(self, width: int, count: int, *, scaled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.scale = nn.Parameter(torch.empty(count, 1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        directions = F.normalize(self.weight, dim=-1)
        return F.linear(x, (directions if self.scale is None else self.scale * directions).to(x.dtype))


class DinoHead(nn.Module):
    """The projection head: [..., width] -> scores [..., prototypes] (arXiv:2104.14294, appendix C).

    Args:
        config: section of the head.
    """

    def __init__(self, config: DinoHeadConfig) -> None:
        super().__init__()
        between = [config.hidden_size] * (config.num_layers - 1)
        sizes = [config.input_size, *between, config.bottleneck_size]
        self.mlp = nn.ModuleList(Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.last_layer = Prototypes(
            config.bottleneck_size, config.output_size, scaled=not config.norm_last_layer
        )

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.mlp):
            x = layer(F.gelu(x) if number else x)
        return self.last_layer(F.normalize(x, dim=-1))  # type: ignore[no-any-return]


class Models(nn.Module):
    """A container of the modules of one part (trunks, heads or losses).

    Args:
        models: modules in the order of their calls.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = nn.ModuleList(models)


class Dino(nn.Module):
    """A student and its teacher. `forward` returns the training loss.

    The params file defines the calls of each module: its arguments are views of the batch, or outputs of
    earlier modules.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: DinoConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.image_model_trunks = Models(
            [ViewEncoder(each.image_model) for each in config.image_model_trunks]
        )
        self.heads = Models([DinoHead(each.head_model) for each in config.heads])
        self.losses = Models([make_loss(each.loss) for each in config.losses])
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def train(self, mode: bool = True) -> Dino:
        """Set the training mode; modules with `stop_grad` (the teacher) always stay in eval mode."""
        super().train(mode)
        for section, model in (*self._trunks(), *self._heads()):
            if section.stop_grad:
                model.eval()
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32: the sum of the losses of the section.

        Args:
            batch: `global_view` and `local_view` [batch, views, channels, h, w], and `collated_masks`
                [batch, global views, patches].
        """
        outputs: dict[tuple[object, ...], Tensor] = {(name,): value for name, value in batch.items()}
        parts = (("image_model_trunks", self._trunks()), ("heads", self._heads()))
        for part, models in parts:
            for number, (section, model) in enumerate(models):
                for index, results in enumerate(self._called(section, model, outputs)):
                    found = results if isinstance(results, tuple) else (results,)
                    outputs |= {(part, number, index, place): each for place, each in enumerate(found)}
        losses = zip(self.config.losses, self.losses.model, strict=True)
        parts_of_loss = [loss for each in losses for loss in self._called(*each, outputs)]
        return torch.stack(parts_of_loss).sum()

    @staticmethod
    def _called(
        section: CalledSection, model: nn.Module, outputs: Mapping[tuple[object, ...], Tensor]
    ) -> list[Any]:
        """Return the outputs of each call of a module: a tensor or a tuple of tensors."""
        with torch.no_grad() if section.stop_grad else contextlib.nullcontext():
            return [
                model(*(None if each is None else outputs[source_of(each)] for each in call))
                for call in section.forward_args
            ]

    def _trunks(self) -> list[tuple[CalledSection, nn.Module]]:
        return list(zip(self.config.image_model_trunks, self.image_model_trunks.model, strict=True))

    def _heads(self) -> list[tuple[CalledSection, nn.Module]]:
        return list(zip(self.config.heads, self.heads.model, strict=True))


def init_parameter(name: str, shape: Sequence[int], config: DinoConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone."""
    for pair in config.copy_init_weights:
        source, target = pair.prefixes
        if name.startswith(target):
            return init_parameter(source + name.removeprefix(target), shape, config, seed)
    part, _, number, inner = name.split(".", 3)
    if part == "heads":
        return draw(name, shape, _head_initializer(inner, config.heads[int(number)].head_model), seed)
    model = config.image_model_trunks[int(number)].image_model
    rows = (model.hidden_size,) * 3 if inner.endswith(".qkv.weight") else ()
    return draw(name, shape, _trunk_initializer(inner, model), seed, rows=rows)


def _head_initializer(name: str, config: DinoHeadConfig) -> InitializerConfig:
    if name.endswith(".bias"):
        return InitializerConfig(name="zeros")
    return InitializerConfig(name="ones") if name == "last_layer.scale" else config.initializer


def _trunk_initializer(name: str, config: ViewEncoderConfig) -> InitializerConfig:
    default = config.matrix_init
    kinds = (
        *BIASES_AND_NORMS,
        (r".*_scale\.weight", InitializerConfig(name="constant", value=config.layerscale_value or 0.0)),
        (r"patches\.weight", config.projection_initializer or default),
        (r"positions\.weight", config.position_embedding_initializer or default),
        (r"(class|mask)_token\.weight", config.cls_token_initializer or default),
    )
    return first_match(name, kinds) or default


_PUBLIC_NAMES = (
    (r"patches\.", "embedding_layer.linear_proj."),
    (r"mask_token\.weight", "embedding_layer.mask_token"),
    (r"class_token\.weight", "embedding_layer.cls_embedding"),
    (r"positions\.weight", "embedding_layer.position_embeddings.weight"),
    (r"blocks\.(\d+)\.attention\.", r"encoder.transformer_encoder.layers.\1.self_attn."),
    (r"blocks\.(\d+)\.ffn\.", r"encoder.transformer_encoder.layers.\1.ffn."),
    (r"blocks\.(\d+)\.", r"encoder.transformer_encoder.layers.\1."),
    (r"norm\.", "encoder.transformer_encoder.norm."),
)
"""Patterns of our names in a trunk, and the names in the public Model Zoo."""


def public_parts(name: str) -> tuple[tuple[str, int], ...]:
    """Return the Model Zoo's name of a parameter and its number of rows (-1: all); empty outside of trunks.

    The names are as exact as the patterns in params files need.
    """
    trunk = re.match(r"image_model_trunks\.model\.\d+\.", name)
    if trunk is None:
        return ()
    below = name.removeprefix(trunk[0])
    for ours, theirs in _PUBLIC_NAMES:
        found = re.match(ours, below)
        if found is not None:
            return ((trunk[0] + found.expand(theirs) + below[found.end() :], -1),)
    return ()
