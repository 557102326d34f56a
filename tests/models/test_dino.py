"""DINOv2: the encoder compared with the transformers library, the losses with their formulas."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.config.models.self_supervised import (
    DinoConfig,
    DistillationConfig,
    KoLeoConfig,
    ViewEncoderConfig,
)
from headwater.core.precision import Precision
from headwater.models.dino import GridPositions
from headwater.models.dino_losses import make_loss
from headwater.models.registry import build_model, meta_batch
from headwater.plan.trace import trace_step

TRUNK = {
    "name": "MultiImageViTModel",
    "image_size": [16, 16],
    "patch_size": [4, 4],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "filter_size": 128,
    "layer_norm_epsilon": 1e-6,
    "layerscale_value": 0.5,
    "use_masked_patches": True,
}
PLACES = {**TRUNK, "image_size": [56, 56]}
HEAD = {"name": "DinoHead", "input_size": 32, "hidden_size": 24, "bottleneck_size": 8, "output_size": 20}
VIEWS = {name: f"ssl_transform.output('{name}')" for name in ("global_view", "local_view", "collated_masks")}


def trunk(number, call, output):
    return f"image_model_trunks.output({number},{call},{output})"


def head(number, call):
    return f"heads.output({number},{call},0)"


def average(part, source, target):
    pair = {"source": f"{part}.model({source})", "target": f"{part}.model({target})"}
    momentum = {"ema_decay_start": 0.9, "ema_decay_end": 1.0, "total_steps": 10}
    return {**pair, "scheduler_name": "cosine", "scheduler_params": momentum}


SECTION = {
    "name": "dino",
    "image_model_trunks": [
        {"image_model": TRUNK, "forward_args": [[VIEWS["global_view"], None, None]], "stop_grad": True},
        {
            "image_model": {**TRUNK, "stochastic_depth_drop_prob": 0.3},
            "forward_args": [
                [VIEWS["global_view"], None, VIEWS["collated_masks"]],
                [VIEWS["local_view"], None, None],
            ],
        },
    ],
    "heads": [
        {"head_model": HEAD, "forward_args": [[trunk(0, 0, 1)], [trunk(0, 0, 0)]], "stop_grad": True},
        {"head_model": HEAD, "forward_args": [[trunk(1, 0, 1)], [trunk(1, 1, 1)], [trunk(1, 0, 0)]]},
    ],
    "losses": [
        {
            "loss": {"name": "DinoDistillationLoss", "input_size": 20, "warmup_teacher_temp_steps": 3},
            "forward_args": [[head(1, 0), head(0, 0), head(1, 1)]],
        },
        {
            "loss": {"name": "iBOTPatchLoss", "input_size": 20},
            "forward_args": [[head(0, 1), head(1, 2), VIEWS["collated_masks"]]],
        },
        {"loss": {"name": "KoLeoLoss"}, "forward_args": [[trunk(1, 0, 1)]]},
    ],
    "copy_init_weights": [
        {"source": f"{part}.model(0)", "target": f"{part}.model(1)"}
        for part in ("image_model_trunks", "heads")
    ],
    "ema": [average("image_model_trunks", 1, 0), average("heads", 1, 0)],
    "freeze": ["image_model_trunks.model.0.*", "heads.model.0.*"],
}


def section(**changes):
    return DinoConfig.model_validate({**SECTION, **changes})


def views(count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "global_view": torch.randn(count, 2, 3, 16, 16, generator=generator),
        "local_view": torch.randn(count, 4, 3, 8, 8, generator=generator),
        "collated_masks": torch.rand(count, 2, 16, generator=generator) < 0.4,
    }


def shaken(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def theirs(ours):
    """Return the transformers library's encoder with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=4, image_size=16, patch_size=4
    )
    model = transformers.Dinov2Model(config).eval()
    weights = dict(ours.named_parameters())
    found = {
        "embeddings.cls_token": weights["class_token.weight"],
        "embeddings.mask_token": weights["mask_token.weight"],
        "embeddings.position_embeddings": weights["positions.weight"],
        "embeddings.patch_embeddings.projection.weight": weights["patches.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patches.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    names = {
        "norm1": "attention_norm", "norm2": "ffn_norm", "mlp.fc1": "ffn.input", "mlp.fc2": "ffn.output",
        "attention.o_proj": "attention.output",
    }  # fmt: skip
    for number in range(3):
        there, here = f"encoder.layer.{number}", f"blocks.{number}"
        for kind in ("weight", "bias"):
            for name, own in names.items():
                found[f"{there}.{name}.{kind}"] = weights[f"{here}.{own}.{kind}"]
            parts = weights[f"{here}.attention.qkv.{kind}"].chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                found[f"{there}.attention.{name}_proj.{kind}"] = part
        found[f"{there}.layer_scale1.lambda1"] = weights[f"{here}.attention_scale.weight"]
        found[f"{there}.layer_scale2.lambda1"] = weights[f"{here}.ffn_scale.weight"]
    state = model.state_dict()
    model.load_state_dict({name: found[renamed(name)].detach().view(state[name].shape) for name in state})
    return model


def renamed(name):
    """Return the name of a weight in newer versions of transformers."""
    parts = {"attention.query": "q_proj", "attention.key": "k_proj", "attention.value": "v_proj"}
    for older, newer in {**parts, "output.dense": "o_proj"}.items():
        name = name.replace(f"attention.{older}", f"attention.{newer}")
    return name


@torch.no_grad()
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [16, 8])
def test_encoder_equals_transformers(size, masked):
    ours = shaken(build_model(section(), seed=5)).eval().image_model_trunks.model[1]
    images = torch.randn(3, 2, 3, size, size, generator=torch.Generator().manual_seed(3))
    masks = torch.rand(3, 2, (size // 4) ** 2, generator=torch.Generator().manual_seed(4)) < 0.4
    patches, tokens = ours(images, None, masks if masked else None)
    there = {"bool_masked_pos": masks.flatten(0, 1)} if masked else {}
    expected = theirs(ours)(images.flatten(0, 1), **there).last_hidden_state.unflatten(0, (3, 2))
    torch.testing.assert_close(tokens, expected[:, :, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(patches, expected[:, :, 1:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_interpolated_positions_with_an_offset_equal_the_published_code():
    interpolation = {"interpolate_offset": 0.1, "antialias": False}
    trunks = [
        {**each, "image_model": {**each["image_model"], "interpolate_position_embedding": interpolation}}
        for each in SECTION["image_model_trunks"]
    ]
    positions = shaken(build_model(section(image_model_trunks=trunks))).image_model_trunks.model[1].positions
    found = positions(torch.zeros(1, 7, 32), (2, 3))[0]
    image = positions.weight[1:].T.view(1, 32, 4, 4)
    # Pixel i of the output is at (i + 0.5) / scale - 0.5, with scale = (new + 0.1) / old.
    rows, columns = ((torch.arange(n) + 0.5) * 4 / (n + 0.1) - 0.5 for n in (2, 3))
    grid = torch.stack([each * 2 / 3 - 1 for each in torch.meshgrid(columns, rows, indexing="xy")], -1)
    options = {"mode": "bicubic", "padding_mode": "border", "align_corners": True}
    expected = F.grid_sample(image, grid[None], **options)[0].flatten(1).T
    torch.testing.assert_close(found[1:], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0], positions.weight[0])


@torch.no_grad()
def test_the_head_is_a_network_with_weight_normalization():
    ours = shaken(build_model(section(heads=heads(norm_last_layer=False)))).heads.model[1]
    last = weight_norm(torch.nn.Linear(8, 20, bias=False))
    last.parametrizations.weight.original0.copy_(ours.last_layer.scale)
    last.parametrizations.weight.original1.copy_(ours.last_layer.weight)
    x = torch.randn(5, 32)
    hidden = ours.mlp[2](F.gelu(ours.mlp[1](F.gelu(ours.mlp[0](x)))))
    torch.testing.assert_close(ours(x), last(F.normalize(hidden, dim=-1)), rtol=1e-5, atol=1e-6)
    plain = build_model(section(heads=heads(norm_last_layer=True)))
    assert "heads.model.1.last_layer.scale" not in dict(plain.named_parameters())


def heads(**changes):
    return [{**each, "head_model": {**HEAD, **changes}} for each in SECTION["heads"]]


def probabilities(scores, center, temperature):
    return ((scores - center) / temperature).softmax(-1)


def test_the_loss_of_whole_views():
    loss = make_loss(
        DistillationConfig(name="DinoDistillationLoss", input_size=6, warmup_teacher_temp_steps=3)
    )
    generator = torch.Generator().manual_seed(1)
    center = torch.zeros(6)
    for temperature in (0.04, 0.055, 0.07, 0.07):
        student, teacher, local = (torch.randn(4, views, 6, generator=generator) for views in (2, 2, 3))
        pairs = [(teacher[:, t], student[:, s]) for t in (0, 1) for s in (0, 1) if t != s]
        pairs += [(teacher[:, t], local[:, s]) for t in (0, 1) for s in range(3)]
        terms = [F.cross_entropy(s / 0.1, probabilities(t, center, temperature)) for t, s in pairs]
        torch.testing.assert_close(loss(student, teacher, local), sum(terms) / len(pairs))
        center = 0.9 * center + 0.1 * teacher.mean((0, 1))
        torch.testing.assert_close(loss.center, center)
    loss.eval()(student, teacher, local)
    torch.testing.assert_close(loss.center, center)
    assert int(loss.step) == 4


def test_the_loss_of_masked_patches():
    loss = make_loss(DistillationConfig(name="iBOTPatchLoss", input_size=6))
    generator = torch.Generator().manual_seed(1)
    teacher, student = torch.randn(2, 3, 2, 5, 6, generator=generator)
    masks = torch.rand(3, 2, 5, generator=generator) < 0.5
    masks[0, 0] = False
    total = 0.0
    for image in range(3):
        for view in range(2):
            seen = masks[image, view]
            if seen.any():
                targets = probabilities(teacher[image, view][seen], 0, 0.07)
                total += F.cross_entropy(student[image, view][seen] / 0.1, targets)
    torch.testing.assert_close(loss(teacher, student, masks), total / 6)
    torch.testing.assert_close(loss.center, 0.1 * teacher[masks].mean(0))
    before = loss.center.clone()
    loss(teacher, student, torch.zeros_like(masks))
    assert torch.equal(loss.center, before)


def test_koleo_loss():
    features = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(1))
    expected = []
    for view in F.normalize(features, dim=-1).unbind(1):
        distances = torch.cdist(view, view) + 10 * torch.eye(5)
        expected.append(-distances.min(1).values.log().mean())
    loss = make_loss(KoLeoConfig(name="KoLeoLoss", loss_weight=0.5))
    torch.testing.assert_close(loss(features), 0.5 * sum(expected) / 2, rtol=1e-4, atol=1e-5)


def test_gradients_reach_only_the_student():
    model, batch = build_model(section(), seed=5).train(), views()
    torch.manual_seed(0)
    loss = model(batch)
    loss.backward()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert all(".model.1." in name for name in trained)
    assert {name for name, value in model.named_parameters() if value.grad is not None} == trained
    drawn = dict(model.named_parameters())
    assert all(
        torch.equal(value, drawn[name.replace("model.0.", "model.1.")]) for name, value in drawn.items()
    )
    assert not model.image_model_trunks.model[0].training and model.image_model_trunks.model[1].training
    # The scores of a new head are nearly equal, so that teacher and student are close to uniform.
    assert 2 * math.log(20) - 1 < loss.item() < 2 * math.log(20) + 2


def test_stochastic_depth_has_its_rate():
    path = build_model(section()).train().image_model_trunks.model[1].blocks[0].path
    torch.manual_seed(1)
    found = path(torch.ones(4000, 3, 2))
    kept = found[:, 0, 0] != 0
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.03)
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / 0.7))
    assert not found[~kept].any() and torch.equal(path.eval()(found), found)


def test_momentum_follows_half_a_cosine():
    average = section().ema[0]
    found = [average.momentum(step) for step in (1, 6, 11, 99)]
    assert found == pytest.approx([0.9, 0.95, 1.0, 1.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"heads": [{"head_model": HEAD, "forward_args": [[trunk(2, 0, 1)]]}]},
            "which no earlier call computes",
        ),
        (
            {"heads": [{"head_model": HEAD, "forward_args": [["trunk.output(0)"]]}]},
            "expected ssl_transform.output",
        ),
        ({"ema": [average("heads", 1, 2)]}, r"heads\.model\(2\) does not exist"),
        (
            {"ema": [{**average("heads", 1, 0), "source": "image_model_trunks.model(1)"}]},
            "to have the same settings",
        ),
    ],
)
def test_contradictory_sections_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        section(**changes)


def test_a_batch_without_values():
    config = section()
    model = build_model(config, device="meta")
    trace = trace_step(model, meta_batch(config, 2), Precision())
    assert len(trace.costs) > 6


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("grid", [(3, 5), (7, 7), (16, 9), (37, 37)])
def test_interpolated_positions_and_their_gradients_equal_torchs_interpolation(grid, offset, antialias):
    config = ViewEncoderConfig(
        **{**PLACES, "interpolate_position_embedding": {"interpolate_offset": offset, "antialias": antialias}}
    )
    positions, old = GridPositions(config), (14, 14)
    places = torch.randn(14 * 14, 8, requires_grad=True)
    scale = [(new + offset) / before for new, before in zip(grid, old, strict=True)]
    size = {"scale_factor": scale} if offset else {"size": list(grid)}
    image = places.unflatten(0, old).permute(2, 0, 1).unsqueeze(0)
    wanted = F.interpolate(image, mode="bicubic", antialias=antialias, **size).squeeze(0).flatten(1).t()
    found = positions._interpolated(places, grid)
    assert (found - wanted).abs().max() < 1e-6 * 4  # values up to 4
    direction = torch.randn(found.shape)
    gradients = [torch.autograd.grad(each, places, direction)[0] for each in (found, wanted)]
    assert torch.allclose(*gradients, atol=2e-5)


def test_the_backward_of_interpolated_positions_uses_no_kernel_that_is_not_deterministic_on_a_gpu():
    config = ViewEncoderConfig(**PLACES)
    places, used = torch.randn(14 * 14, 8, requires_grad=True), []

    class AttentionContext(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.append(str(func))
            return func(*args, **(kwargs or {}))

    with AttentionContext():
        GridPositions(config)._interpolated(places, (7, 7)).sum().backward()
    assert not [name for name in used if "upsample" in name and "backward" in name]
