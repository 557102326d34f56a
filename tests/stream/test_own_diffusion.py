"""Diffusion models: each trains with two slabs to the bits of plain PyTorch."""

import dataclasses
import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, make_engine, train_plain, train_streamed

from headwater.config.models.diffusion import DiTConfig
from headwater.models.diffusion import generate_images
from headwater.models.registry import build_model

DIT = DiTConfig.model_validate(
    {
        "name": "dit",
        "num_classes": 7,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "filter_size": 48,
        "dropout_rate": 0.1,
        "label_dropout_rate": 0.5,
        "vae": {"latent_size": [8, 12], "latent_channels": 2},
    }
)


def job(positions):
    def batch(step, index):
        generator = torch.Generator().manual_seed(100 * step + index)
        inputs, noise = torch.randn(2, 3, *DIT.latent_shape, generator=generator)
        numbers = {"timesteps": 1000, "labels": 7, "no_label": 2}
        return {"inputs": inputs, "noise": noise} | {
            name: torch.randint(0, limit, (3,), generator=generator) for name, limit in numbers.items()
        }

    config = DIT.model_copy(update={"position_embedding_type": positions})
    return Job(lambda: build_model(config), batch, lambda model, batch: model(batch), micro_batches=2)


@functools.cache
def plain(positions):
    return train_plain(job(positions), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("positions", ["fixed", "learned"])
def test_a_streamed_model_equals_plain_pytorch(positions, setting, tmp_path):
    expected = plain(positions)
    assert len(set(expected.losses)) == 3
    assert_equal(train_streamed(job(positions), setting, tmp_path, steps=3), expected)


def test_images_are_generated_with_streamed_weights(tmp_path):
    pytest.importorskip("diffusers")
    process = {"sampler": {"name": "ddim", "num_inference_steps": 3}, "pipeline": {"guidance_scale": 2.0}}
    config = DiTConfig.model_validate({**DIT.model_dump(exclude_unset=True), "reverse_process": process})
    own = dataclasses.replace(job("fixed"), make_model=lambda: build_model(config))
    with make_engine(own, Setting("disk", 2), tmp_path) as engine:
        engine.train_step(own.batches(0), own.update(0))
        plain = build_model(config).eval()
        plain.load_state_dict({name: value.clone() for name, value in engine.named_masters()})
        engine.model.eval()
        with engine.inference():
            found = generate_images(engine.model, [0, 4], seed=3)
    assert torch.equal(found, generate_images(plain, [0, 4], seed=3))
