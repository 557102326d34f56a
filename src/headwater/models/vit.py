"""The vision transformer (ViT): classifies images with attention over their patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import InitializerConfig
from headwater.config.models.vision import ImageEncoderSection, ViTConfig
from headwater.core.errors import DataError
from headwater.models.bert import Pooler
from headwater.models.encoder import EncoderBlock
from headwater.models.evaluation import Accuracy
from headwater.models.layers.attention import AttentionContext
from headwater.models.layers.initializers import BIASES_AND_NORMS, draw, first_match, initialize
from headwater.models.layers.linear import Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.layers.positions import sinusoidal_positions


class PatchEmbedding(Linear):
    """Linear embedding of patches: [batch, channels, h, w] -> [batch, n, hidden].

    See arXiv:2010.11929, section 3.1. The inputs of the layer are the pixels of a patch in the order channel,
    row, column.

    Args:
        channels: channels of the images.
        patch_size: height and width of a patch.
        width: elements of an embedding.
        bias: add a bias.
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
    """Layer that puts a trained vector before the tokens: [batch, n, hidden] -> [batch, 1 + n, hidden]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.to(x.dtype).expand(len(x), 1, -1), x), dim=1)


class LearnedPositions(nn.Module):
    """Layer that adds a trained vector for each position: [batch, n, hidden] -> same shape."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.to(x.dtype)


class FixedPositions(nn.Module):
    """Layer that adds sinusoidal position embeddings: [batch, n, hidden] -> same shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x + sinusoidal_positions(x.shape[1], x.shape[2], device=x.device).to(x.dtype)


class ImageEncoder(nn.Module):
    """An encoder of image patches: [batch, channels, h, w] -> [batch, tokens, hidden].

    Args:
        config: section of the encoder.
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
        """Return the hidden states [batch, tokens, hidden]; the class token is the first.

        Args:
            images: images, [batch, channels, h, w].
            num_blocks: run only this number of blocks, without the last normalization; by default run all.

        Raises:
            DataError: if the images do not have the model's channels and size.
        """
        expected = [self.config.num_channels, *self.config.image_size]
        if list(images.shape[1:]) != expected:
            raise DataError(
                f"expected images of shape {expected}, got {list(images.shape[1:])}",
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
        seen = AttentionContext(causal=False)
        for block in self.blocks[:num_blocks]:
            x = block(x, seen)
        return x if self.norm is None or num_blocks is not None else self.norm(x)  # type: ignore[no-any-return]

    def _positions(self) -> nn.Module | None:
        config = self.config
        if config.position_embedding_type == "learned":
            return LearnedPositions(config.num_patches + config.prepend_cls_token, config.hidden_size)
        return FixedPositions() if config.position_embedding_type == "fixed" else None


class ViT(nn.Module):
    """A vision transformer, which classifies images (arXiv:2010.11929). `forward` returns the training loss.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.

    Attributes:
        scored: metrics that are updated in eval mode, by name.
    """

    def __init__(self, config: ViTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.vit_model = ImageEncoder(config)
        self.pooler = Pooler(width, config.pooler_nonlinearity) if config.use_encoder_pooler_layer else None
        inputs = 2 * width if config.use_dinov2_classifier else width
        self.classifier = Linear(inputs, config.num_classes, bias=config.use_bias_in_output)
        self.scored = {"accuracy": Accuracy("accuracy")} if config.compute_eval_metrics else {}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: `inputs` [batch, channels, h, w] and `labels` [batch].
        """
        logits, labels = self.logits(batch), batch["labels"].long()
        if not self.training and self.scored:
            self.scored["accuracy"].add(logits.argmax(-1) == labels)
        return F.cross_entropy(logits, labels)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, classes], fp32."""
        return self.classifier(self._features(self.vit_model(batch["inputs"]))).float()  # type: ignore[no-any-return]

    def _features(self, hidden: Tensor) -> Tensor:
        """Return the classifier's inputs [batch, features] for hidden states [batch, tokens, hidden]."""
        if self.config.use_dinov2_classifier:
            return torch.cat((hidden[:, 0], hidden[:, 1:].mean(1)), dim=-1)
        if self.pooler is not None:
            return self.pooler(hidden)  # type: ignore[no-any-return]
        return hidden[:, 0] if self.config.prepend_cls_token else hidden.mean(1)


def init_parameter(name: str, shape: Sequence[int], config: ImageEncoderSection, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone."""
    kinds = (
        *BIASES_AND_NORMS,
        (r".*_scale\.weight", InitializerConfig(name="constant", value=config.layerscale_value or 0.0)),
    )
    initializer = first_match(name, kinds) or config.matrix_init
    rows = (config.hidden_size,) * 3 if name.endswith(".qkv.weight") else ()
    return draw(name, shape, initializer, seed, rows=rows)
