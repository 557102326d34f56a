"""LLaVA: a language model in which features of images replace the embeddings of some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headwater.config.models.common import InitializerConfig
from headwater.config.models.multimodal import ImageModelConfig, MultimodalSection, ProjectorConfig
from headwater.models import decoder, decoder_parameters, vit
from headwater.models.decoder import Decoder, Inserted
from headwater.models.layers.feed_forward import NONLINEARITIES
from headwater.models.layers.initializers import draw, initialize
from headwater.models.layers.linear import Linear
from headwater.models.vit import ImageEncoder


class Projector(nn.Module):
    """Linear layers with nonlinearities: [..., input] -> [..., output] (arXiv:2310.03744, section 3.2).

    Args:
        config: section of the projector.
    """

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        inputs = config.input_unit
        for outputs, _, _ in config.layers:
            self.layers.append(Linear(inputs, outputs, bias=config.use_bias))
            inputs = outputs
        self.nonlinearities = [function and NONLINEARITIES[function] for _, function, _ in config.layers]
        self.dropouts = nn.ModuleList(nn.Dropout(rate) for _, _, rate in config.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, nonlinearity, dropout in zip(self.layers, self.nonlinearities, self.dropouts, strict=True):
            x = layer(x)
            x = dropout(x if nonlinearity is None else nonlinearity(x))
        return x


class ImageTower(nn.Module):
    """An image encoder and its projector: [images, channels, h, w] -> [images, tokens, width].

    The features are the output of block `num_blocks`. Later blocks do not run; their weights are frozen, and
    are kept for checkpoints.

    Args:
        config: section of the encoder.
        num_blocks: number of blocks that run.
        projection: section of the projector of the features; `None`: no projector.
        class_token: also return the feature of the class token.
    """

    def __init__(
        self,
        config: ImageModelConfig,
        num_blocks: int,
        projection: ProjectorConfig | None,
        *,
        class_token: bool,
    ) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.first = int(config.prepend_cls_token and not class_token)
        self.encoder = ImageEncoder(config)
        self.encoder.blocks[num_blocks:].requires_grad_(False)
        if self.encoder.norm is not None:
            self.encoder.norm.requires_grad_(False)
        self.projection = nn.Identity() if projection is None else Projector(projection)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.encoder(images, self.num_blocks)
        return self.projection(hidden[:, self.first :])  # type: ignore[no-any-return]


class ImageTowers(nn.Module):
    """Several image encoders with concatenated outputs: [images, channels, h, w] -> [images, tokens, width].

    Args:
        config: the model section of a params file.
    """

    def __init__(self, config: MultimodalSection) -> None:
        super().__init__()
        class_token = config.features == "cls_patch"
        self.image_model_list = nn.ModuleList(
            ImageTower(*tower, class_token=class_token) for tower in config.towers
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([tower(images) for tower in self.image_model_list], dim=1)


class Llava(nn.Module):
    """A language model that reads images (arXiv:2304.08485). `forward` returns the training loss.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: MultimodalSection, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.image_model = ImageTowers(config)
        self.projector = nn.Identity() if config.projection is None else Projector(config.projection)
        self.text_model = Decoder(config.decoder, seed=seed)
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: `images` [batch, images, channels, h, w]; `image_places` [batch, images, tokens], the
                position of each feature in its sequence, or a position beyond the end if the image is
                missing; and `input_ids`, `labels` and `attention_mask` [batch, seq] as for `Decoder`.
        """
        return self.text_model(batch, self._inserted(batch))  # type: ignore[no-any-return]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, seq, vocab] of the token after each token."""
        hidden = self.text_model.hidden(batch["input_ids"], inserted=self._inserted(batch))
        return self.text_model.head(hidden)  # type: ignore[no-any-return]

    def _inserted(self, batch: Mapping[str, Tensor]) -> Inserted:
        images, places = batch["images"], batch["image_places"]
        features = self.projector(self.image_model(images.flatten(0, 1)))
        return Inserted(features.view(len(images), -1, features.shape[-1]), places.flatten(1).long())


_TEXT = "text_model."


def num_labels(config: MultimodalSection, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of labels over which the loss of a batch is a mean; `None`: a mean over samples."""
    return decoder.num_labels(config.decoder, batch)


def init_parameter(name: str, shape: Sequence[int], config: MultimodalSection, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone."""
    if name.startswith(_TEXT):
        return decoder_parameters.init_parameter(name.removeprefix(_TEXT), shape, config.decoder, seed)
    if ".encoder." in name:
        number = int(name.removeprefix("image_model.image_model_list.").partition(".")[0])
        return vit.init_parameter(name, shape, config.towers[number].encoder, seed)
    bias = name.endswith(".bias")
    return draw(name, shape, InitializerConfig(name="zeros" if bias else "xavier_uniform"), seed)


def learning_rate_scale(name: str, config: MultimodalSection) -> float:
    """Return the factor on the learning rate of parameter `name`; 1 without muP."""
    if not name.startswith(_TEXT):
        return 1.0
    return decoder_parameters.learning_rate_scale(name.removeprefix(_TEXT), config.decoder)
