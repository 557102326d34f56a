"""The vision transformer: a class for each image, by attention over its patches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models import ImageEncoderSection, InitializerConfig, ViTConfig
from headwater.core.errors import DataError
from headwater.models.bert import Pooler
from headwater.models.encoder import EncoderBlock
from headwater.models.evaluation import Scored
from headwater.models.layers.attention import Seen
from headwater.models.layers.initializers import draw, initialize
from headwater.models.layers.linear import Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.layers.positions import sinusoidal_positions


class PatchEmbedding(Linear):
    """A vector for each patch (arXiv:2010.11929, section 3.1): [batch, channels, h, w] -> [batch, n, hidden].

    A patch's pixels are multiplied channel by channel, and row by row in each.

    Args:
        channels: of the images.
        patch_size: height and width of a patch.
        width: elements of a vector.
        bias: whether one is added.
    """

    def __init__(self, channels: int, patch_size: tuple[int, int], width: int, *, bias: bool) -> None:
        height, breadth = patch_size
        super().__init__(channels * height * breadth, width, bias=bias)
        self.patch_size = patch_size

    def forward(self, input: Tensor) -> Tensor:
        height, width = self.patch_size
        rows, columns = input.shape[2] // height, input.shape[3] // width
        patches = input.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        return super().forward(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


class ClassToken(nn.Module):
    """Puts a trained vector before all others: [batch, n, hidden] -> [batch, 1 + n, hidden]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.to(x.dtype).expand(len(x), 1, -1), x), dim=1)


class LearnedPositions(nn.Module):
    """Adds a trained vector for each place: [batch, n, hidden] -> same."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.to(x.dtype)


class FixedPositions(nn.Module):
    """Adds the sines and cosines of each place: [batch, n, hidden] -> same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + sinusoidal_positions(x.shape[1], x.shape[2], device=x.device).to(x.dtype)


class ImageEncoder(nn.Module):
    """Hidden states of an image's patches: [batch, channels, h, w] -> [batch, tokens, hidden].

    Args:
        config: the encoder.
    """

    def __init__(self, config: ImageEncoderSection) -> None:
        super().__init__()
        self.config = config
        width, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.patches = PatchEmbedding(
            config.num_channels, config.patch_size, width, bias=config.use_embed_proj_bias
        )
        self.class_token = ClassToken(width) if config.prepend_cls_token else None
        self.positions = self._positions()
        self.embedding_norm = LayerNorm(width, epsilon) if config.use_post_embed_layer_norm else None
        self.embedding_dropout = nn.Dropout(config.embedding_dropout_rate)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                config,
                projection_bias=config.use_projection_bias_in_attention,
                attention_bias=config.use_ffn_bias_in_attention,
                ffn_bias=config.use_ffn_bias,
                layer_scale=config.layerscale_value is not None,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(width, epsilon) if config.norm_first else None

    def forward(self, images: Tensor, num_blocks: int | None = None) -> Tensor:
        """Hidden states [batch, tokens, hidden], the class token's first.

        Args:
            images: [batch, channels, h, w].
            num_blocks: give what the first so many blocks make of them, without the last normalization; run
                all if not given.

        Raises:
            DataError: if the images are not as large as the model's.
        """
        expected = [self.config.num_channels, *self.config.image_size]
        if list(images.shape[1:]) != expected:
            raise DataError(
                f"images have shape {list(images.shape[1:])}, the model takes {expected}",
                where="model.image_size",
                remedy="resize or crop the images, or train a model of their size",
            )
        x = self.patches(images)
        if self.class_token is not None:
            x = self.class_token(x)
        if self.positions is not None:
            x = self.positions(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.embedding_dropout(x)
        seen = Seen(causal=False)
        for block in self.blocks[:num_blocks]:
            x = block(x, seen)
        return x if self.norm is None or num_blocks is not None else self.norm(x)  # type: ignore[no-any-return]

    def _positions(self) -> nn.Module | None:
        config = self.config
        if config.position_embedding_type == "learned":
            return LearnedPositions(config.num_patches + config.prepend_cls_token, config.hidden_size)
        return FixedPositions() if config.position_embedding_type == "fixed" else None


class ViT(nn.Module):
    """A class for each image (arXiv:2010.11929). `forward` gives the training loss.

    Args:
        config: the model section of a params file.
        fused_loss: has no effect: the classes are few.
        seed: seed of the initial weights.

    Attributes:
        scored: what is counted in eval mode, by name.
    """

    def __init__(self, config: ViTConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.vit_model = ImageEncoder(config)
        self.pooler = Pooler(width, config.pooler_nonlinearity) if config.use_encoder_pooler_layer else None
        inputs = 2 * width if config.use_dinov2_classifier else width
        self.classifier = Linear(inputs, config.num_classes, bias=config.use_bias_in_output)
        self.scored = {"accuracy": Scored("accuracy")} if config.compute_eval_metrics else {}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Training loss, a scalar in fp32, of `inputs` [batch, channels, h, w] and `labels` [batch]."""
        logits, labels = self.logits(batch), batch["labels"].long()
        if not self.training and self.scored:
            self.scored["accuracy"].add(logits.argmax(-1) == labels)
        return F.cross_entropy(logits, labels)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, classes], fp32."""
        return self.classifier(self._features(self.vit_model(batch["inputs"]))).float()  # type: ignore[no-any-return]

    def _features(self, hidden: Tensor) -> Tensor:
        """What the class is read off, [batch, features], of hidden states [batch, tokens, hidden]."""
        if self.config.use_dinov2_classifier:
            return torch.cat((hidden[:, 0], hidden[:, 1:].mean(1)), dim=-1)
        if self.pooler is not None:
            return self.pooler(hidden)  # type: ignore[no-any-return]
        return hidden[:, 0] if self.config.prepend_cls_token else hidden.mean(1)


def init_parameter(name: str, shape: Sequence[int], config: ImageEncoderSection, seed: int) -> Tensor:
    """Initial value of the parameter called `name`, fp32 on the CPU; it depends on the arguments alone."""
    kinds = (
        (r".*\bbias", InitializerConfig(name="zeros")),
        (r".*norm\.weight", InitializerConfig(name="ones")),
        (r".*_scale\.weight", InitializerConfig(name="constant", value=config.layerscale_value or 0.0)),
        (r".*", config.matrix_init),
    )
    initializer = next(initializer for pattern, initializer in kinds if re.fullmatch(pattern, name))
    rows = (config.hidden_size,) * 3 if name.endswith(".qkv.weight") else ()
    return draw(name, shape, initializer, seed, rows=rows)
