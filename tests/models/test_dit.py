"""The diffusion transformer, its noise and its images, compared with the diffusers library."""

import pytest
import torch
from pydantic import ValidationError

from headwater.config import load_params, shipped_params
from headwater.config.models.diffusion import DiTConfig
from headwater.core.errors import ConfigError
from headwater.models.diffusion import add_noise, generate_images, noise_variances
from headwater.models.layers.attention import AttentionContext
from headwater.models.registry import build_model, meta_batch
from shared_data import SHARED

diffusers = pytest.importorskip("diffusers")

SIZES = {
    "name": "dit",
    "num_classes": 7,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "filter_size": 128,
    "frequency_embedding_size": 256,
    "vae": {"latent_size": [8, 8], "latent_channels": 4},
    "reverse_process": {"sampler": {"num_inference_steps": 20}},
}


def section(**changes):
    return DiTConfig.model_validate({**SIZES, **changes})


def dit(**changes):
    """Return a model in which every parameter is random and not zero."""
    model = build_model(section(**changes), seed=5).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(count=4):
    generator = torch.Generator().manual_seed(1)
    inputs, noise = torch.randn(2, count, 4, 8, 8, generator=generator)
    return {
        "inputs": inputs,
        "noise": noise,
        "timesteps": torch.randint(0, 1000, (count,), generator=generator),
        "labels": torch.randint(0, 7, (count,), generator=generator),
        "no_label": torch.arange(count) % 2 == 0,
    }


def theirs(ours, nonlinearity="gelu-approximate"):
    """Return diffusers' model with the same weights."""
    config = ours.config
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=config.layer_norm_epsilon,
        activation_fn=nonlinearity,
    ).eval()

    def copy(there, here):
        there.load_state_dict({name: value.view_as(there.state_dict()[name]) for name, value in here.items()})

    copy(model.pos_embed.proj, ours.patches.state_dict())
    copy(model.proj_out_1, ours.head.modulation.state_dict())
    copy(model.proj_out_2, ours.head.output.state_dict())
    for there, here in zip(model.transformer_blocks, ours.blocks, strict=True):
        embedding = there.norm1.emb
        # The paper's published code uses this frequency, the library a slightly different one.
        embedding.time_proj.downscale_freq_shift = 0
        copy(embedding.timestep_embedder.linear_1, ours.time_embedding.input.state_dict())
        copy(embedding.timestep_embedder.linear_2, ours.time_embedding.output.state_dict())
        copy(embedding.class_embedder.embedding_table, ours.label_embedding.state_dict())
        copy(there.norm1.linear, here.modulation.state_dict())
        attention = there.attn1
        stacked = here.attention.qkv.state_dict()
        for number, part in enumerate((attention.to_q, attention.to_k, attention.to_v)):
            copy(part, {name: value.chunk(3)[number] for name, value in stacked.items()})
        copy(attention.to_out[0], here.attention.output.state_dict())
        copy(there.ff.net[0].proj, here.ffn.input.state_dict())
        copy(there.ff.net[2], here.ffn.output.state_dict())
    return model


@torch.no_grad()
@pytest.mark.parametrize(("ours", "there"), [("gelu_new", "gelu-approximate"), ("gelu", "gelu")])
def test_equals_diffusers(ours, there):
    model, example = dit(encoder_nonlinearity=ours), batch()
    labels = torch.where(example["no_label"], 7, example["labels"])
    found = model.predict_noise(example["inputs"], example["timesteps"], labels)
    expected = theirs(model, there)(
        example["inputs"], timestep=example["timesteps"], class_labels=labels, return_dict=False
    )[0]
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ours", "there"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_noise_grows_as_in_diffusers(ours, there):
    scheduler = diffusers.DDPMScheduler(beta_schedule=there, beta_start=1e-4, beta_end=0.02)
    example = batch()
    found = add_noise(example["inputs"], example["noise"], example["timesteps"], noise_variances(ours, 1000))
    expected = scheduler.add_noise(example["inputs"], example["noise"], example["timesteps"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_loss():
    model, example = dit(), batch()
    scheduler = diffusers.DDPMScheduler(beta_start=1e-4, beta_end=0.02)
    images = scheduler.add_noise(example["inputs"], example["noise"], example["timesteps"])
    for training in (False, True):
        labels = torch.where(example["no_label"] & training, 7, example["labels"])
        noise = model.predict_noise(images, example["timesteps"], labels)
        expected = (noise - example["noise"]).square().mean()
        torch.testing.assert_close(model.train(training)(example), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_new_model_predicts_zero_and_its_blocks_are_the_identity():
    model, example = build_model(section(), seed=5), batch()
    assert not model.predict_noise(example["inputs"], example["timesteps"], example["labels"]).any()
    x = torch.randn(2, 16, 32)
    assert torch.equal(model.blocks[0](x, torch.randn(2, 32), AttentionContext(causal=False)), x)


class Oracle:
    """A model that predicts the exact noise for a given image."""

    def __init__(self, config):
        self.config = config
        self.image = torch.randn(config.latent_shape, generator=torch.Generator().manual_seed(3))
        self.left = (1 - noise_variances(config.schedule_name, config.num_diffusion_steps)).cumprod(0)
        self.labels = []

    def predict_noise(self, images, timesteps, labels):
        self.labels.append(labels)
        left = self.left[timesteps].float()[:, None, None, None]
        return (images - left.sqrt() * self.image) / (1 - left).sqrt()


@pytest.mark.parametrize("name", ["ddim", "ddpm"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_exact_noise_prediction_restores_the_image(name, schedule):
    process = {"sampler": {"name": name, "num_inference_steps": 50}, "pipeline": {"guidance_scale": 3.0}}
    oracle = Oracle(section(schedule_name=schedule, reverse_process=process))
    images = generate_images(oracle, [1, 5], seed=4)
    torch.testing.assert_close(images, oracle.image.expand(2, -1, -1, -1), rtol=0, atol=2e-2)
    assert len(oracle.labels) == 50
    assert all(labels.tolist() == [1, 5, 7, 7] for labels in oracle.labels)


def test_guidance_equals_the_paper():
    class Two(Oracle):
        def predict_noise(self, images, timesteps, labels):
            return (labels[:, None, None, None] * torch.ones_like(images)).float()

    def first(channels):
        pipeline = {"guidance_scale": 4.0, "num_cfg_channels": channels}
        sampler = {"name": "ddim", "num_inference_steps": 1}
        return generate_images(Two(section(reverse_process={"sampler": sampler, "pipeline": pipeline})), [2])

    # 7 + 4 (2 - 7) = -13 in guided channels, 2 in the others
    whole, three = first(None), first(3)
    left = float((1 - noise_variances("linear", 1000)).prod())
    start = whole * left**0.5 - 13 * (1 - left) ** 0.5
    torch.testing.assert_close(three[:, :3], whole[:, :3])
    free = three * left**0.5 + 2 * (1 - left) ** 0.5
    torch.testing.assert_close(free[:, 3:], start[:, 3:], rtol=0, atol=1e-4)


def test_same_seed_makes_the_same_images():
    model = dit()
    first, again, other = (generate_images(model, [0, 3], seed=seed) for seed in (1, 1, 2))
    assert first.shape == (2, 4, 8, 8) and torch.equal(first, again) and not torch.equal(first, other)
    with pytest.raises(ConfigError, match=r"expected classes in \[0, 7\)"):
        generate_images(model, [7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"patch_size": [3, 2]}, "patch_size"),
        ({"norm_first": False}, "norm_first"),
        ({"num_diffusion_steps": 10}, "num_inference_steps"),
        (
            {"label_dropout_rate": 0.0, "reverse_process": {"pipeline": {"guidance_scale": 2.0}}},
            "label_dropout",
        ),
        ({"reverse_process": {"pipeline": {"custom_labels": [7]}}}, "custom_labels"),
    ],
)
def test_contradictory_sections_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        section(**changes)


@pytest.mark.parametrize(
    ("sizes", "millions"),
    # Table 1 of arXiv:2212.09748
    [((384, 12, 6), 33), ((768, 12, 12), 130), ((1024, 24, 16), 458), ((1152, 28, 16), 675)],
)
def test_sizes_equal_the_paper(sizes, millions):
    width, layers, heads = sizes
    config = DiTConfig.model_validate(
        {"name": "dit", "hidden_size": width, "num_hidden_layers": layers, "num_heads": heads}
        | {"filter_size": 4 * width}
    )
    model = build_model(config, device="meta")
    assert sum(value.numel() for value in model.parameters()) == pytest.approx(millions * 1e6, rel=0.02)
    assert model(meta_batch(config, 2)).shape == ()


@pytest.mark.parametrize("size", ["small", "base", "large", "xlarge"])
def test_shipped_sizes_are_the_public_ones(size):
    path = SHARED / f"public_params/vision/dit/configs/params_dit_{size}_patchsize_2x2.yaml"
    if not path.exists():
        pytest.skip("the public params files are not here")
    public, own = load_params(path), load_params(shipped_params()[f"dit/{size}_2"])
    models = own.init.model, public.init.model
    assert effective_keys(models[0], models[1]) == effective_keys(models[1], models[1])
    optimizers = [
        (each.init.optimizer.name, each.init.optimizer.arguments.kwargs()) for each in (own, public)
    ]
    assert optimizers[0] == optimizers[1] and own.init.schedulers == public.init.schedulers


def effective_keys(model, without):
    """Return the keys of a section, except those that `without` sets but that have no effect."""
    process, other = model.reverse_process, without.reverse_process
    return [
        own.model_dump(exclude={key for key, _ in given.notices()} | {"vae", "reverse_process"})
        for own, given in (
            (model, without),
            (model.vae, without.vae),
            (process.sampler, other.sampler),
            (process.pipeline, other.pipeline),
        )
    ]
