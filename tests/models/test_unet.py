"""The U-Net compared with one built from PyTorch's layers, its losses and its metrics."""

import pytest
import torch
from pydantic import ValidationError
from tests.fake_cuda import fake_cuda
from torch import nn
from torch.nn import functional as F

from headwater.config.models.vision import UNetConfig
from headwater.core.errors import DataError
from headwater.models.registry import build_model
from headwater.models.unet import dice_loss, pixel_cross_entropy

SIZES = {"name": "unet", "num_classes": 3, "encoder_filters": [4, 8, 16], "image_size": [8, 12]}


def unet(**changes):
    return build_model(UNetConfig.model_validate({**SIZES, **changes}), seed=5)


def batch(classes=3, size=(8, 12)):
    generator = torch.Generator().manual_seed(1)
    return {
        "inputs": torch.randn(2, 1, *size, generator=generator),
        "labels": torch.randint(0, classes, (2, *size), generator=generator),
    }


class Plain(nn.Module):
    """The model of figure 1 of arXiv:1505.04597, with padding and three resolutions."""

    def __init__(self, norm):
        super().__init__()

        def block(inputs, outputs):
            layers = []
            for width in (inputs, outputs):
                layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=norm is None)]
                layers += [norm(outputs)] if norm else []
                layers += [nn.ReLU()]
            return nn.Sequential(*layers)

        self.down0, self.down1, self.down2 = block(1, 4), block(4, 8), block(8, 16)
        self.up1, self.block1 = nn.ConvTranspose2d(16, 8, 2, 2), block(16, 8)
        self.up0, self.block0 = nn.ConvTranspose2d(8, 4, 2, 2), block(8, 4)
        self.output = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        high = self.down0(x)
        middle = self.down1(F.max_pool2d(high, 2))
        x = self.down2(F.max_pool2d(middle, 2))
        x = self.block1(torch.cat((middle, self.up1(x)), 1))
        x = self.block0(torch.cat((high, self.up0(x)), 1))
        return self.output(x)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("batchnorm2d", nn.BatchNorm2d),
        ("instancenorm2d", lambda width: nn.InstanceNorm2d(width, affine=True)),
        (None, None),
    ],
    ids=["batch", "instance", "none"],
)
def test_equals_a_model_of_pytorchs_layers(name, norm):
    ours, plain = unet(norm_layer=name), Plain(norm)
    own = ours.state_dict()
    assert [tuple(v.shape) for v in own.values()] == [tuple(v.shape) for v in plain.state_dict().values()]
    plain.load_state_dict(dict(zip(plain.state_dict(), own.values(), strict=True)))
    given = batch()
    for training in (True, False):
        ours.train(training)
        plain.train(training)
        ours_out, expected = ours.logits(given), plain(given["inputs"])
        torch.testing.assert_close(ours_out, expected, rtol=1e-5, atol=1e-5)
    loss = ours.train()(given)
    torch.testing.assert_close(loss, F.cross_entropy(plain.train()(given["inputs"]), given["labels"]))
    loss.backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_on_a_gpu_each_pixel_is_a_row_of_the_loss(monkeypatch):
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    expected, entropy, shapes = F.cross_entropy(logits, labels), F.cross_entropy, []

    def recorded(logits, labels):
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return entropy(logits, labels)

    monkeypatch.setattr(F, "cross_entropy", recorded)
    with fake_cuda():
        found = pixel_cross_entropy(logits.to("meta"), labels.to("meta"))
    assert shapes == [((40, 3), (40,))]
    torch.testing.assert_close(found.values, expected)


def test_initial_values_keep_the_spread_of_activations():
    model = unet(encoder_filters=[32, 64, 128], norm_layer=None, image_size=[32, 32])
    with torch.no_grad():
        logits = model.logits(batch(size=(32, 32)))
    assert 0.2 < float(logits.std()) < 5


def test_binary_loss_of_one_class():
    model, given = unet(num_classes=1, loss="bce"), batch(classes=2)
    logits = model.logits(given)
    expected = F.binary_cross_entropy_with_logits(logits[:, 0], given["labels"].float())
    torch.testing.assert_close(model(given), expected)


def test_dice_loss():
    targets = torch.zeros(1, 2, 2, 2)
    targets[0, 0, 0], targets[0, 1, 1] = 1, 1
    assert dice_loss(targets, targets).item() == pytest.approx(0)
    assert dice_loss(1 - targets, targets).item() == pytest.approx(1)
    # Each class: 2 · (0.5 + 0.5) / (4 · 0.25 + 2).
    assert dice_loss(torch.full_like(targets, 0.5), targets).item() == pytest.approx(1 - 2 / 3)
    model, given = unet(loss="cross_entropy_dice", dice_weight=2.0), batch()
    logits = model.logits(given)
    dice = dice_loss(logits.softmax(1), F.one_hot(given["labels"], 3).permute(0, 3, 1, 2).float())
    torch.testing.assert_close(model(given), F.cross_entropy(logits, given["labels"]) + 2 * dice)


def test_metrics_equal_a_confusion_matrix():
    metrics = pytest.importorskip("headwater.metrics")
    model = unet().eval()
    iou, dice = metrics.MeanIOUMetric(3), metrics.DiceCoefficientMetric(3)
    for seed in (1, 2):
        given = batch()
        given["labels"] = given["labels"].roll(seed, -1)
        model(given)
        found = model.logits(given).argmax(1)
        iou.update(given["labels"], found)
        dice.update(given["labels"], found)
    scored = {name: score.compute() for name, score in model.scored.items()}
    assert scored["mean_iou"] == pytest.approx(float(iou.compute()))
    assert scored["mean_dice"] == pytest.approx(float(dice.compute()))
    model.scored["mean_iou"].reset()
    assert model.scored["mean_iou"].compute() == 0 and model.scored["mean_iou"].update_count == 0


def test_images_of_other_sizes():
    model = unet()
    assert model.logits(batch(size=(16, 4))).shape == (2, 3, 16, 4)
    with pytest.raises(DataError, match="multiples of 4"):
        model.logits(batch(size=(8, 10)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 1}, "needs num_classes >= 2"),
        ({"image_size": [8, 10]}, "multiples of 4"),
        ({"encoder_filters": [4]}, "at least 2"),
    ],
)
def test_contradictory_sections_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        unet(**changes)
