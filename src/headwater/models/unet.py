"""The U-Net: classifies each pixel of an image with convolutions at several resolutions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import InitializerConfig
from headwater.config.models.vision import UNetConfig
from headwater.core.errors import DataError
from headwater.models.evaluation import Accuracy, Overlap
from headwater.models.layers.convolution import BatchNorm2d, Conv2d, ConvTranspose2d
from headwater.models.layers.feed_forward import NONLINEARITIES
from headwater.models.layers.initializers import draw, initialize


def _norm(channels: int, config: UNetConfig) -> nn.Module:
    match config.norm_layer:
        case "batchnorm2d":
            return BatchNorm2d(channels, config.norm_epsilon)
        case "instancenorm2d":
            return nn.InstanceNorm2d(channels, eps=config.norm_epsilon, affine=True)
        case None:
            return nn.Identity()


class Convolution(nn.Module):
    """3x3 convolution, normalization, nonlinearity: [batch, inputs, h, w] -> [batch, outputs, h, w].

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        config: the model section of a params file.
    """

    def __init__(self, inputs: int, outputs: int, config: UNetConfig) -> None:
        super().__init__()
        # Without a bias before a normalization, which would subtract the bias again.
        self.convolution = Conv2d(inputs, outputs, 3, padding=1, bias=config.norm_layer is None)
        self.norm = _norm(outputs, config)
        self.nonlinearity = NONLINEARITIES[config.nonlinearity]

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinearity(self.norm(self.convolution(x)))


class ConvolutionBlock(nn.Sequential):
    """Convolutions at one resolution: [batch, inputs, h, w] -> [batch, outputs, h, w].

    Args:
        inputs: channels of the input.
        outputs: channels of the output.
        config: the model section of a params file.
    """

    def __init__(self, inputs: int, outputs: int, config: UNetConfig) -> None:
        widths = [inputs, *[outputs] * config.convs_per_block]
        super().__init__(*(Convolution(*pair, config) for pair in itertools.pairwise(widths)))


class UpBlock(nn.Module):
    """A step up to the next resolution: upsampling, then convolutions together with the skip connection.

    Args:
        inputs: channels of the lower resolution.
        outputs: channels of this resolution.
        config: the model section of a params file.
    """

    def __init__(self, inputs: int, outputs: int, config: UNetConfig) -> None:
        super().__init__()
        self.up = ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.block = ConvolutionBlock(2 * outputs, outputs, config)

    def forward(self, lower: Tensor, skip: Tensor) -> Tensor:
        return self.block(torch.cat((skip, self.up(lower)), dim=1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A U-Net, which classifies each pixel (arXiv:1505.04597). `forward` returns the training loss.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.

    Attributes:
        scored: metrics that are updated in eval mode, by name.
    """

    def __init__(self, config: UNetConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        filters = config.encoder_filters
        self.down = nn.ModuleList(
            ConvolutionBlock(*pair, config) for pair in itertools.pairwise((config.input_channels, *filters))
        )
        self.dropout = nn.Dropout2d(config.dropout_rate)
        self.up = nn.ModuleList(UpBlock(*pair, config) for pair in itertools.pairwise(reversed(filters)))
        self.output = Conv2d(filters[0], config.num_classes, 1)
        classes = max(2, config.num_classes)
        self.scored: dict[str, Accuracy | Overlap] = {}
        if config.compute_eval_metrics:
            self.scored = {
                "accuracy": Accuracy("accuracy"),
                "mean_iou": Overlap("mean_iou", classes),
                "mean_dice": Overlap("mean_dice", classes, dice=True),
            }
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: `inputs` [batch, channels, h, w] and `labels` [batch, h, w].
        """
        logits, labels = self.logits(batch), batch["labels"].long()
        if not self.training:
            self._score(logits, labels)
        match self.config.loss:
            case "bce":
                return F.binary_cross_entropy_with_logits(logits, self._one_hot(labels))
            case "cross_entropy":
                return pixel_cross_entropy(logits, labels)
            case "cross_entropy_dice":
                dice = dice_loss(logits.softmax(1), self._one_hot(labels))
                return pixel_cross_entropy(logits, labels) + self.config.dice_weight * dice

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, classes, h, w], fp32.

        Raises:
            DataError: if height or width is not a multiple of the model's stride.
        """
        x, stride = batch["inputs"], self.config.stride
        if x.shape[2] % stride or x.shape[3] % stride:
            raise DataError(
                f"expected images whose height and width are multiples of {stride}, "
                f"got {x.shape[2]} x {x.shape[3]} pixels",
                where="model.encoder_filters",
                remedy=f"crop the images to multiples of {stride}, or use fewer encoder_filters",
            )
        passed = [x := self.down[0](x)]
        for block in self.down[1:]:
            passed.append(x := block(F.max_pool2d(x, 2)))
        x = self.dropout(passed.pop())
        for block in self.up:
            x = block(x, passed.pop())
        return self.output(x).float()  # type: ignore[no-any-return]

    def _one_hot(self, labels: Tensor) -> Tensor:
        """Return classes [batch, h, w] as a one-hot tensor [batch, classes, h, w], fp32."""
        if self.config.num_classes == 1:
            return labels.unsqueeze(1).float()
        classes = torch.arange(self.config.num_classes, device=labels.device)
        return (labels.unsqueeze(1) == classes[:, None, None]).float()

    def _score(self, logits: Tensor, labels: Tensor) -> None:
        found = logits.argmax(1) if self.config.num_classes > 1 else (logits.squeeze(1) > 0).long()
        for score in self.scored.values():
            if isinstance(score, Overlap):
                score.add(found, labels)
            else:
                score.add(found == labels)


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over all pixels, a scalar.

    Args:
        logits: [batch, classes, h, w].
        labels: the class of each pixel, [batch, h, w], int64.
    """
    if logits.is_cuda:  # torch's kernel for images is not deterministic there; that for rows is
        logits, labels = logits.movedim(1, -1).flatten(0, -2), labels.flatten()
    return F.cross_entropy(logits, labels)


def dice_loss(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - soft Dice coefficient, the mean over the classes (arXiv:1606.04797, section 3).

    Args:
        probabilities: predicted probabilities, [batch, classes, h, w].
        targets: 1 for the class of a pixel, else 0, of the same shape.
    """
    over = (0, 2, 3)
    sizes = probabilities.square().sum(over) + targets.square().sum(over)
    coefficients = 2 * (probabilities * targets).sum(over) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return 1 - coefficients.mean()


def init_parameter(name: str, shape: Sequence[int], config: UNetConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`: He's (arXiv:1502.01852, equation 10) for convolutions.

    The fan-in of a transposed convolution is its number of input channels, because its kernel is as wide as
    its stride.
    """
    if name.endswith("bias"):
        return torch.zeros(*shape)
    if ".norm." in name:
        return torch.ones(*shape)
    inputs = shape[0] if name.endswith(".up.weight") else shape[1] * shape[2] * shape[3]
    return draw(name, shape, InitializerConfig(name="normal", std=(2 / inputs) ** 0.5), seed)
