"""Image models."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Section, SectionError
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


class FCMnistConfig(Section):
    """A classifier of handwritten digits with fully connected layers.

    Attributes:
        depth: number of hidden layers.
        hidden_size: width of each hidden layer.
        dropout: dropout rate after each hidden layer.
        activation_fn: nonlinearity after each hidden layer.
        compute_eval_metrics: compute the accuracy in evaluations.
    """

    name: Literal["fc_mnist"]
    depth: int = Field(default=2, ge=1)
    hidden_size: int = Field(default=256, ge=1)
    dropout: Rate = 0.0
    activation_fn: Nonlinearity = "relu"
    compute_eval_metrics: bool = True
    to_float16: Annotated[bool, NoEffect("the precision of the run is used")] = False


Size = Annotated[tuple[int, int], AsTuple]
"""Height and width in pixels."""


class ImageEncoderSection(Section):
    """A transformer over the patches of an image (arXiv:2010.11929).

    Attributes:
        image_size: height and width of the images.
        patch_size: height and width of a patch; `image_size` must be a multiple of it.
        prepend_cls_token: insert a class token before the patches.
        position_embedding_type: `learned`, `fixed` for sines and cosines (arXiv:1706.03762, section 3.5), or
            null for none.
        use_post_embed_layer_norm: normalize the input of the first block.
        norm_first: normalize the input of each part of a block (pre-norm) and the output of the last block,
            not the residual sum after each part.
        layerscale_value: initial value of a trained factor on the output of each part of a block
            (arXiv:2103.17239); no factor if absent.
        attention_type: `dot_product` does not divide scores by the square root of the head size.
        use_ffn_bias_in_attention: add a bias to the attention's output.
        initializer_range: standard deviation of matrices without an initializer.
    """

    image_size: Size = (224, 224)
    patch_size: Size = (16, 16)
    num_channels: int = Field(default=3, ge=1)
    use_conv_patchified_embedding: ConvolvedPatches = False
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
    attention_softmax_fp32: SoftmaxInFP32 = True
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    use_ffn_bias: bool = True
    initializer_range: float = Field(default=0.02, gt=0)
    initializer: InitializerConfig | None = None

    @model_validator(mode="after")
    def _sizes_divide(self) -> Self:
        check_heads(self.hidden_size, self.num_heads)
        if min(*self.image_size, *self.patch_size) < 1:
            raise ValueError(
                "expected image_size and patch_size to be numbers of pixels >= 1, found "
                f"{list(self.image_size)} and {list(self.patch_size)}"
            )
        if any(size % patch for size, patch in zip(self.image_size, self.patch_size, strict=True)):
            raise ValueError(
                f"image_size {list(self.image_size)} is not a multiple of patch_size {list(self.patch_size)}"
            )
        return self

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return (height // patch_height) * (width // patch_width)

    @property
    def encoder_nonlinearity(self) -> Nonlinearity:
        """Nonlinearity of the feed-forward parts."""
        return self.nonlinearity

    @property
    def attention_scale(self) -> float:
        """Factor on the product of query and key."""
        return attention_scale(self.attention_type, self.hidden_size // self.num_heads)

    @property
    def attention_dropout(self) -> float:
        return first_given(self.attention_dropout_rate, self.dropout_rate)

    @property
    def matrix_init(self) -> InitializerConfig:
        """Initializer of matrices."""
        return self.initializer or InitializerConfig(name="truncated_normal", std=self.initializer_range)


class ViTConfig(ImageEncoderSection):
    """A classifier of images with a transformer over their patches (arXiv:2010.11929).

    The classifier reads the class token; without `prepend_cls_token`, the mean of the patches.

    Attributes:
        use_encoder_pooler_layer: insert a layer between the class token and the classifier.
        use_dinov2_classifier: the classifier reads the class token and the mean of the patches, concatenated
            (arXiv:2304.07193, section B.3).
        use_bias_in_output: add a bias to the last layer.
        freeze: regular expressions; parameters whose names match one of them are not trained.
        compute_eval_metrics: compute the accuracy in evaluations.
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
                raise ValueError(f"{key} needs prepend_cls_token: true")
        if self.use_encoder_pooler_layer and self.use_dinov2_classifier:
            raise ValueError("use_encoder_pooler_layer and use_dinov2_classifier cannot be used together")
        return self


class UNetConfig(Section):
    """A U-Net: a classifier of pixels with convolutions at several resolutions (arXiv:1505.04597).

    Convolutions are padded, so that the logits have the size of the image.

    Attributes:
        input_channels: number of channels of the images.
        image_size: height and width of the training images; the model also accepts other sizes.
        num_classes: number of classes of a pixel. With 1 the only loss is `bce`.
        encoder_filters: number of channels at each resolution; each resolution is half of the previous one.
        convs_per_block: number of 3x3 convolutions at each resolution in the encoder, and in the decoder.
        norm_layer: normalization after each convolution: over the batch (`batchnorm2d`, arXiv:1502.03167),
            over each image (`instancenorm2d`, arXiv:1607.08022), or null for none.
        norm_epsilon: number added to the variance.
        nonlinearity: nonlinearity after each normalization.
        dropout_rate: dropout rate of whole channels at the lowest resolution.
        loss: `bce` for the binary cross-entropy of each class, `cross_entropy` over the classes, or
            `cross_entropy_dice` with the soft Dice loss added (arXiv:1606.04797, section 3).
        dice_weight: factor on the Dice loss.
        freeze: regular expressions; parameters whose names match one of them are not trained.
        compute_eval_metrics: compute pixel accuracy, mean IoU and mean Dice in evaluations.
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
            raise SectionError(f"loss {self.loss} needs num_classes >= 2, found 1", "write loss: bce")
        if any(size < 1 or size % self.stride for size in self.image_size):
            raise ValueError(
                f"expected image_size to be multiples of {self.stride}, which can be halved "
                f"{len(self.encoder_filters) - 1} times, found {list(self.image_size)}"
            )
        return self

    @property
    def stride(self) -> int:
        """Divisor that the height and the width of an image must have: 2 for each halving in the encoder."""
        return int(2 ** (len(self.encoder_filters) - 1))
