"""Models that read images and text."""

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
    """Linear layers, each with a nonlinearity and dropout or without.

    Attributes:
        input_unit: width of what comes in.
        layers_units: width of what each layer gives.
        layers_activation: what follows each layer; nothing where it is null or the list is absent.
        layers_dropout_rates: dropout after that, likewise.
        use_bias: bias of every layer.
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
                raise ValueError(f"{key} has {len(given)} values for the {layers} layers of layers_units")
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
        """Width of what comes out."""
        return self.layers_units[-1]


class ImageModelConfig(ImageEncoderSection):
    """An image encoder that gives features."""

    name: Literal["ViTModel"] = "ViTModel"
    use_encoder_pooler_layer: Annotated[bool, NoEffect("features are taken before it")] = False

    def blocks_of(self, layer: int) -> int:
        """Blocks that run for the features of a layer.

        Raises:
            ValueError: if there is no such layer.
        """
        count = layer + self.num_hidden_layers + 1 if layer < 0 else layer
        if not 0 <= count <= self.num_hidden_layers:
            raise ValueError(f"there is no layer {layer} in a model of {self.num_hidden_layers}")
        return count


class Tower(NamedTuple):
    """An image encoder, and what is done to its features.

    Attributes:
        encoder: the encoder.
        num_blocks: of its blocks those that run.
        projection: what its features go through before they are joined with those of others.
    """

    encoder: ImageModelConfig
    num_blocks: int
    projection: ProjectorConfig | None

    @property
    def width(self) -> int:
        """Of a feature."""
        return self.encoder.hidden_size if self.projection is None else self.projection.output_unit


def _decoder(section: Any) -> Any:
    """The section of a decoder, with the names that public files have for a language model without head."""
    if not isinstance(section, dict):
        return section
    section = {_DECODER_KEYS.get(key, key): value for key, value in section.items()}
    name = section.get("name")
    return section | ({"name": _DECODER_NAMES[name]} if name in _DECODER_NAMES else {})


_DECODER_KEYS = {"embd_pdrop": "embedding_dropout_rate"}
_DECODER_NAMES = {"LlamaModel": "llama"}


class MultimodalSection(Section):
    """A language model that reads features of images in place of some of its tokens (arXiv:2304.08485).

    Attributes:
        text_model: the model section of any decoder.
        freeze: regular expressions; parameters whose names one of them matches are not trained.
        image_token_id: token that stands where features come; it is not looked at.
        loss_scaling: `num_tokens`: the mean over the labels; `batch_size`: their sum over the samples.
        loss_weight: factor on the loss that is scaled by `batch_size`.
    """

    text_model: Annotated[DecoderConfig, Reads(_decoder, also(_DECODER_KEYS, _DECODER_NAMES))]
    freeze: Annotated[tuple[str, ...], AsTuple] = ()
    image_token_id: int = Field(default=0, ge=0)
    loss_scaling: Literal["num_tokens", "batch_size"] = "num_tokens"
    loss_weight: float = Field(default=1.0, gt=0)

    @property
    @abstractmethod
    def towers(self) -> tuple[Tower, ...]:
        """The image encoders; their features follow each other."""

    @property
    @abstractmethod
    def projection(self) -> ProjectorConfig | None:
        """What the features of all encoders go through."""

    @property
    @abstractmethod
    def features(self) -> FeatureMode:
        """Which hidden states are features."""

    @property
    def decoder(self) -> DecoderConfig:
        """The language model with the loss of this section."""
        loss = {"loss_scaling": self.loss_scaling, "loss_weight": self.loss_weight}
        return self.text_model.model_copy(update=loss)

    @property
    def share_embedding_weights(self) -> bool:
        """Whether the language model's head is its embedding."""
        return self.text_model.share_embedding_weights

    @property
    def matrix_init(self) -> InitializerConfig:
        """Of the language model's matrices."""
        return self.text_model.matrix_init

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        encoder = self.towers[0].encoder
        return (encoder.num_channels, *encoder.image_size)

    @property
    def num_features(self) -> int:
        """Tokens whose place an image takes."""
        class_token = self.features == "cls_patch"
        return sum(
            tower.encoder.num_patches + (class_token and tower.encoder.prepend_cls_token)
            for tower in self.towers
        )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _loss_is_said_once(self.text_model)
        shapes = {(tower.encoder.num_channels, *tower.encoder.image_size) for tower in self.towers}
        if len(shapes) != 1:
            raise ValueError("the image models take images of several sizes")
        width = _joined_width(self.towers)
        if self.projection is not None:
            _fits("the image features", width, "the projector", self.projection.input_unit)
            width = self.projection.output_unit
        _fits("the projected features", width, "text_model.hidden_size", self.text_model.hidden_size)
        if self.image_token_id >= self.text_model.vocab_size:
            raise ValueError(f"image_token_id ({self.image_token_id}) is not below text_model.vocab_size")
        return self


def _loss_is_said_once(text_model: DecoderConfig) -> None:
    given = text_model.model_fields_set & {"loss_scaling", "loss_weight"}
    if given:
        raise ValueError(f"{min(given)} belongs beside text_model, not into it")


def _joined_width(towers: Sequence[Tower]) -> int:
    """Width of the features of all encoders."""
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
        raise ValueError(f"the features of the image models are {sorted(widths)} wide, and follow each other")
    return widths.pop()


def _fits(what: str, given: int, where: str, taken: int) -> None:
    if given != taken:
        raise ValueError(f"{what} are {given} wide, and {where} takes {taken}")


class ProjectorsConfig(Section):
    """What comes between the parts.

    Attributes:
        image_model: between image encoder and language model.
    """

    image_model: ProjectorConfig


class LlavaConfig(MultimodalSection):
    """LLaVA: one image encoder, one projector, one language model (arXiv:2310.03744).

    Attributes:
        image_model: the image encoder.
        projector: what makes its features as wide as the language model; none if they are.
        image_feature_select_layer_idx: after which block the features are taken, counted from the last if
            below 0: -1 is the last one, -2 the one before. They are not normalized.
        image_feature_select_mode: `patch`: features of the patches; `cls_patch`: of the class token, too.
        image_start_idx: place of the first feature in data that do not say it.
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
    """An image encoder of several.

    Attributes:
        image_layer_idx: see `image_feature_select_layer_idx` of `LlavaConfig`.
    """

    image_layer_idx: int = -1


class ProjectedImageModelConfig(Section):
    """One of several image encoders.

    Attributes:
        image_encoder: the encoder.
        projection_layer: what its features go through before those of others follow.
    """

    image_encoder: LayeredImageModelConfig
    projection_layer: ProjectorConfig | None = None


class ImageModelListConfig(Section):
    """Image encoders that look at the same image.

    Attributes:
        image_feature_select_mode: `patch`: features of the patches; `cls_patch`: of the class tokens, too.
        image_models: the encoders; their features follow each other.
        global_image_projection: what all features go through.
    """

    image_feature_select_mode: FeatureMode = "patch"
    image_models: Annotated[tuple[ProjectedImageModelConfig, ...], Field(min_length=1), AsTuple]
    global_image_projection: ProjectorConfig | None = None


class MultimodalSimpleConfig(MultimodalSection):
    """A language model that reads several images, each by several encoders, anywhere in a text.

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
