"""Multimodal models, which read images and text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Reads, Section, also
from headwater.config.models.common import InitializerConfig, Nonlinearity, Rate
from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.vision import ImageEncoderSection

Width = Annotated[int, Field(ge=1)]
FeatureMode = Literal["patch", "cls_patch"]


class ProjectorConfig(Section):
    """A sequence of linear layers, with optional nonlinearities and dropout.

    Attributes:
        input_unit: width of the input.
        layers_units: width of the output of each layer.
        layers_activation: nonlinearity after each layer; an entry can be null, or the list absent, for none.
        layers_dropout_rates: dropout rate after each nonlinearity; null or absent for none.
        use_bias: add a bias to every layer.
    """

    name: Literal["FeedForwardNetwork"] = "FeedForwardNetwork"
    input_unit: Width
    layers_units: Annotated[tuple[Width, ...], Field(min_length=1), AsTuple]
    layers_activation: Annotated[tuple[Nonlinearity | None, ...] | None, AsTuple] = None
    layers_dropout_rates: Annotated[tuple[Rate | None, ...] | None, AsTuple] = None
    use_bias: bool = True

    @model_validator(mode="after")
    def _one_for_each_layer(self) -> Self:
        layers = len(self.layers_units)
        for key in ("layers_activation", "layers_dropout_rates"):
            given = getattr(self, key)
            if given is not None and len(given) != layers:
                raise ValueError(
                    f"expected {layers} values in {key}, one for each of layers_units, found {len(given)}"
                )
        return self

    @property
    def layers(self) -> Sequence[tuple[int, Nonlinearity | None, float]]:
        """Width, nonlinearity and dropout rate of each layer."""
        none = (None,) * len(self.layers_units)
        functions, rates = self.layers_activation or none, self.layers_dropout_rates or none
        parts = zip(self.layers_units, functions, rates, strict=True)
        return [(width, function, rate or 0.0) for width, function, rate in parts]

    @property
    def output_unit(self) -> int:
        """Width of the output."""
        return self.layers_units[-1]


class ImageModelConfig(ImageEncoderSection):
    """An image encoder whose hidden states are used as features."""

    name: Literal["ViTModel"] = "ViTModel"
    use_encoder_pooler_layer: Annotated[bool, NoEffect("the features are those before the pooler")] = False

    def blocks_of(self, layer: int) -> int:
        """Return the number of blocks that must run for the features of a layer.

        Args:
            layer: number of the layer; negative numbers count from the last one, -1.

        Raises:
            ValueError: if the layer does not exist.
        """
        count = layer + self.num_hidden_layers + 1 if layer < 0 else layer
        if not 0 <= count <= self.num_hidden_layers:
            raise ValueError(
                f"expected a layer of a model with {self.num_hidden_layers} layers, found {layer}"
            )
        return count


class Tower(NamedTuple):
    """An image encoder and, if its features are projected, the projection.

    Attributes:
        encoder: the encoder.
        num_blocks: number of its blocks that run.
        projection: projection of its features before they are joined with those of other encoders.
    """

    encoder: ImageModelConfig
    num_blocks: int
    projection: ProjectorConfig | None

    @property
    def width(self) -> int:
        """Width of a feature."""
        return self.encoder.hidden_size if self.projection is None else self.projection.output_unit


def _decoder(section: Any) -> Any:
    """Return the section of a headless language model with the keys and the name of a `Decoder` section."""
    if not isinstance(section, dict):
        return section
    section = {_DECODER_KEYS.get(key, key): value for key, value in section.items()}
    name = section.get("name")
    return section | ({"name": _DECODER_NAMES[name]} if name in _DECODER_NAMES else {})


_DECODER_KEYS = {"embd_pdrop": "embedding_dropout_rate"}
_DECODER_NAMES = {"LlamaModel": "llama"}


class MultimodalSection(Section):
    """A language model in which image features replace some of the tokens (arXiv:2304.08485).

    Attributes:
        text_model: the model section of any decoder.
        freeze: regular expressions; parameters whose names match one of them are not trained.
        image_token_id: placeholder token at the places of features; its embedding is not used.
        loss_scaling: divisor of the summed loss: the number of labels (`num_tokens`) or of samples
            (`batch_size`).
        loss_weight: factor on the loss if `loss_scaling` is `batch_size`.
    """

    text_model: Annotated[DecoderConfig, Reads(_decoder, also(_DECODER_KEYS, _DECODER_NAMES))]
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    image_token_id: int = Field(default=0, ge=0)
    loss_scaling: Literal["num_tokens", "batch_size"] = "num_tokens"
    loss_weight: float = Field(default=1.0, gt=0)

    @property
    @abstractmethod
    def towers(self) -> tuple[Tower, ...]:
        """The image encoders, whose features are concatenated along the sequence."""

    @property
    @abstractmethod
    def projection(self) -> ProjectorConfig | None:
        """The projection of the features of all encoders."""

    @property
    @abstractmethod
    def features(self) -> FeatureMode:
        """The kind of hidden states of an image encoder that are used as features."""

    @property
    def decoder(self) -> DecoderConfig:
        """The settings of the language model, with the settings of the loss from this section."""
        loss = {"loss_scaling": self.loss_scaling, "loss_weight": self.loss_weight}
        return self.text_model.model_copy(update=loss)

    @property
    def share_embedding_weights(self) -> bool:
        """True if the language model's head is its embedding."""
        return self.text_model.share_embedding_weights

    @property
    def matrix_init(self) -> InitializerConfig:
        """Initializer of the language model's matrices."""
        return self.text_model.matrix_init

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        encoder = self.towers[0].encoder
        return (encoder.num_channels, *encoder.image_size)

    @property
    def num_features(self) -> int:
        """Number of tokens that an image replaces."""
        class_token = self.features == "cls_patch"
        return sum(
            tower.encoder.num_patches + (class_token and tower.encoder.prepend_cls_token)
            for tower in self.towers
        )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _check_loss_keys(self.text_model)
        shapes = {(tower.encoder.num_channels, *tower.encoder.image_size) for tower in self.towers}
        if len(shapes) != 1:
            raise ValueError(f"expected image models of one image size, found {sorted(shapes)}")
        width = _joined_width(self.towers)
        if self.projection is not None:
            _fits("the image features", width, "the projector", self.projection.input_unit)
            width = self.projection.output_unit
        _fits("the projected features", width, "text_model.hidden_size", self.text_model.hidden_size)
        if self.image_token_id >= self.text_model.vocab_size:
            raise ValueError(
                "expected image_token_id < text_model.vocab_size, "
                f"found {self.image_token_id} and {self.text_model.vocab_size}"
            )
        return self


def _check_loss_keys(text_model: DecoderConfig) -> None:
    given = text_model.model_fields_set & {"loss_scaling", "loss_weight"}
    if given:
        raise ValueError(f"{min(given)} must be written in the section model, not in text_model")


def _joined_width(towers: Sequence[Tower]) -> int:
    """Return the width of the features of all encoders. Raise if the encoders' widths differ."""
    for tower in towers:
        if tower.projection is not None:
            _fits(
                "the image features",
                tower.encoder.hidden_size,
                "projection_layer",
                tower.projection.input_unit,
            )
    widths = {tower.width for tower in towers}
    if len(widths) != 1:
        raise ValueError(f"expected image features of one width, found {sorted(widths)}")
    return widths.pop()


def _fits(what: str, given: int, where: str, taken: int) -> None:
    if given != taken:
        raise ValueError(f"{what} have width {given}, but {where} has {taken}")


class ProjectorsConfig(Section):
    """The projectors between the parts of a model.

    Attributes:
        image_model: the projector between the image encoder and the language model.
    """

    image_model: ProjectorConfig


class LlavaConfig(MultimodalSection):
    """LLaVA: one image encoder, one projector, one language model (arXiv:2310.03744).

    Attributes:
        image_model: the image encoder.
        projector: projector of the features to the width of the language model; absent if they have it.
        image_feature_select_layer_idx: number of the block whose output is used as features; negative numbers
            count from the last block, -1. The features are not normalized.
        image_feature_select_mode: `patch` for the features of the patches, `cls_patch` to include that of the
            class token.
        image_start_idx: position of the first feature, for data that do not contain it.
    """

    name: Literal["llava"]
    image_model: ImageModelConfig
    projector: ProjectorsConfig | None = None
    image_feature_select_layer_idx: int = -1
    image_feature_select_mode: FeatureMode = "patch"
    image_start_idx: int = Field(default=1, ge=0)

    @property
    def towers(self) -> tuple[Tower, ...]:
        return (
            Tower(self.image_model, self.image_model.blocks_of(self.image_feature_select_layer_idx), None),
        )

    @property
    def projection(self) -> ProjectorConfig | None:
        return None if self.projector is None else self.projector.image_model

    @property
    def features(self) -> FeatureMode:
        return self.image_feature_select_mode


class LayeredImageModelConfig(ImageModelConfig):
    """An image encoder of a model with several encoders.

    Attributes:
        image_layer_idx: number of the block whose output is used as features; negative numbers count from the
            last block, -1. The features are not normalized.
    """

    image_layer_idx: int = -1


class ProjectedImageModelConfig(Section):
    """An image encoder with its projection.

    Attributes:
        image_encoder: the encoder.
        projection_layer: projection of its features before they are joined with those of other encoders.
    """

    image_encoder: LayeredImageModelConfig
    projection_layer: ProjectorConfig | None = None


class ImageModelListConfig(Section):
    """Several image encoders that read the same image.

    Attributes:
        image_feature_select_mode: `patch` for the features of the patches, `cls_patch` to include those of
            the class tokens.
        image_models: the encoders; their features are concatenated along the sequence.
        global_image_projection: projection of all features.
    """

    image_feature_select_mode: FeatureMode = "patch"
    image_models: Annotated[tuple[ProjectedImageModelConfig, ...], Field(min_length=1), AsTuple]
    global_image_projection: ProjectorConfig | None = None


class MultimodalSimpleConfig(MultimodalSection):
    """A language model that reads any number of images in a text, each with one or several encoders.

    Attributes:
        image_model_list: the image encoders and their projectors.
    """

    name: Literal["multimodal_simple"]
    image_model_list: ImageModelListConfig

    @property
    def towers(self) -> tuple[Tower, ...]:
        return tuple(
            Tower(
                each.image_encoder,
                each.image_encoder.blocks_of(each.image_encoder.image_layer_idx),
                each.projection_layer,
            )
            for each in self.image_model_list.image_models
        )

    @property
    def projection(self) -> ProjectorConfig | None:
        return self.image_model_list.global_image_projection

    @property
    def features(self) -> FeatureMode:
        return self.image_model_list.image_feature_select_mode
