"""Models of images."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Section
from headwater.config.models.common import InitializerConfig, Nonlinearity, Rate


class FCMnistConfig(Section):
    """Handwritten digits by fully connected layers.

    Attributes:
        depth: hidden layers.
        hidden_size: width of each.
        dropout: rate after each.
        activation_fn: after each.
        compute_eval_metrics: accuracy besides the loss.
    """

    name: Literal["fc_mnist"]
    depth: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=256, ge=1)
    dropout: Rate = 0.0
    activation_fn: Nonlinearity = "relu"
    compute_eval_metrics: bool = True
    to_float16: Annotated[bool, NoEffect("the precision of the run holds")] = False


Size = Annotated[tuple[int, int], AsTuple]
"""Height and width in pixels."""


class ImageEncoderSection(Section):
    """A transformer over the patches of an image (arXiv:2010.11929).

    Attributes:
        image_size: height and width of the images.
        patch_size: height and width of a patch; both sizes of an image are multiples.
        prepend_cls_token: a token before the patches.
        position_embedding_type: `learned`, or `fixed`: sines and cosines (arXiv:1706.03762, section 3.5), or
            none.
        use_post_embed_layer_norm: normalize what enters the first block.
        norm_first: normalize what a part of a block reads, and what the last block gives.
        layerscale_value: initial factor on what each part of a block adds (arXiv:2103.17239); no factor
            where absent.
        attention_type: `dot_product` leaves out the division by the root of the head size.
        use_ffn_bias_in_attention: bias of the attention's output.
        initializer_range: standard deviation of every matrix without an initializer.
    """

    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    num_channels: int = Field(default=3, ge=1)
    use_conv_patchified_embedding: Annotated[
        bool, NoEffect("a convolution of patches that do not overlap is the same product")
    ] = False
    use_embed_proj_bias: bool = True
    prepend_cls_token: bool = True
    position_embedding_type: Literal["learned", "fixed"] | None = "learned"
    use_post_embed_layer_norm: bool = False
    embedding_dropout_rate: Rate = 0.0

    hidden_size: int = Field(default=768, ge=1)
    num_hidden_layers: int = Field(default=12, ge=1)
    num_heads: int = Field(default=12, ge=1)
    filter_size: int = Field(default=3072, ge=1)
    nonlinearity: Nonlinearity = "gelu"
    norm_first: bool = True
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    layerscale_value: float | None = None
    dropout_rate: Rate = 0.0
    attention_dropout_rate: Rate | None = None
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_softmax_fp32: Annotated[bool, NoEffect("the softmax is always in fp32")] = True
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    use_ffn_bias: bool = True
    initializer_range: float = Field(default=0.02, gt=0)
    initializer: InitializerConfig | None = None

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_heads ({self.num_heads})"
            )
        if min(*self.image_size, *self.patch_size) < 1:
            raise ValueError("image_size and patch_size are numbers of pixels, at least 1")
        if any(size % patch for size, patch in zip(self.image_size, self.patch_size, strict=True)):
            raise ValueError(
                f"image_size {list(self.image_size)} is not a multiple of patch_size {list(self.patch_size)}"
            )
        return self

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return (height // patch_height) * (width // patch_width)

    @property
    def encoder_nonlinearity(self) -> Nonlinearity:
        """Of the feed-forward parts."""
        return self.nonlinearity

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        return 1.0 if self.attention_type == "dot_product" else (self.hidden_size // self.num_heads) ** -0.5

    @property
    def attention_dropout(self) -> float:
        return self.dropout_rate if self.attention_dropout_rate is None else self.attention_dropout_rate

    @property
    def matrix_init(self) -> InitializerConfig:
        """Of every matrix."""
        return self.initializer or InitializerConfig(name="truncated_normal", std=self.initializer_range)


class ViTConfig(ImageEncoderSection):
    """A class for each image, by a transformer over its patches (arXiv:2010.11929).

    The class is read off the token before the patches, or off their mean where there is none.

    Attributes:
        use_encoder_pooler_layer: a layer between the first token and the classes.
        use_dinov2_classifier: the class is read off the first token and the mean of the patches, side by side
            (arXiv:2304.07193, section B.3).
        use_bias_in_output: bias of the last layer.
        freeze: regular expressions; parameters whose names one of them matches are not trained.
        compute_eval_metrics: accuracy besides the loss.
    """

    name: Literal["vision_transformer"]
    num_classes: int = Field(default=1000, ge=1)
    use_encoder_pooler_layer: bool = False
    pooler_nonlinearity: Nonlinearity = "tanh"
    use_dinov2_classifier: bool = False
    use_bias_in_output: bool = True
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    compute_eval_metrics: bool = True

    @model_validator(mode="after")
    def _first_token_is_there(self) -> Self:
        for key in ("use_encoder_pooler_layer", "use_dinov2_classifier"):
            if getattr(self, key) and not self.prepend_cls_token:
                raise ValueError(f"{key} needs prepend_cls_token")
        if self.use_encoder_pooler_layer and self.use_dinov2_classifier:
            raise ValueError("use_encoder_pooler_layer and use_dinov2_classifier exclude each other")
        return self


class UNetConfig(Section):
    """A class for each pixel of an image, by convolutions at several resolutions (arXiv:1505.04597).

    Convolutions are padded, so that the logits are as large as the image.

    Attributes:
        input_channels: of the images.
        image_size: height and width of the images to train on; the model takes others, too.
        num_classes: of a pixel. 1: whether it is of the class or not; `bce` only.
        encoder_filters: channels at each resolution, each half of the one before.
        convs_per_block: 3x3 convolutions at each resolution on the way down, and again on the way up.
        norm_layer: after each convolution: over the batch (arXiv:1502.03167), over each image
            (arXiv:1607.08022), or none.
        norm_epsilon: added to the variance.
        nonlinearity: after each normalization.
        dropout_rate: whole channels at the lowest resolution.
        loss: `bce`: binary cross entropy of the pixels, of each class on its own where there are several.
            `cross_entropy`: over the classes. `cross_entropy_dice`: with soft Dice loss (arXiv:1606.04797,
            section 3) added.
        dice_weight: factor on the Dice loss.
        freeze: regular expressions; parameters whose names one of them matches are not trained.
        compute_eval_metrics: accuracy of the pixels, mean IoU and mean Dice besides the loss.
    """

    name: Literal["unet"]
    input_channels: int = Field(default=1, ge=1)
    image_size: Size = (256, 256)
    num_classes: int = Field(default=2, ge=1)
    encoder_filters: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=2), AsTuple] = (
        64, 128, 256, 512, 1024,
    )  # fmt: skip
    convs_per_block: int = Field(default=2, ge=1)
    norm_layer: Literal["batchnorm2d", "instancenorm2d"] | None = "batchnorm2d"
    norm_epsilon: float = Field(default=1e-5, gt=0)
    nonlinearity: Nonlinearity = "relu"
    dropout_rate: Rate = 0.0
    loss: Literal["bce", "cross_entropy", "cross_entropy_dice"] = "cross_entropy"
    dice_weight: float = Field(default=1.0, ge=0)
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    compute_eval_metrics: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_classes == 1 and self.loss != "bce":
            raise ValueError(f"the loss {self.loss} needs num_classes of 2 or more; with 1 it is bce")
        if any(size < 1 or size % self.stride for size in self.image_size):
            raise ValueError(
                f"image_size {list(self.image_size)} cannot be halved {len(self.encoder_filters) - 1} times: "
                f"give multiples of {self.stride}"
            )
        return self

    @property
    def stride(self) -> int:
        """Both sizes of an image are multiples of this."""
        return int(2 ** (len(self.encoder_filters) - 1))
