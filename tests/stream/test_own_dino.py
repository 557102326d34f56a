"""DINO: a student and its teacher, a moving average, stream to the bits of plain PyTorch."""

import functools

import pytest
import torch
from harness import Job, Setting, assert_equal, make_engine, train_plain, train_streamed

from headwater.config.models.self_supervised import DinoConfig
from headwater.core.errors import ConfigError
from headwater.models.registry import FAMILIES, build_model
from headwater.trainer.averages import MovingAverages
from headwater.trainer.job import Average

TRUNK = {
    "name": "MultiImageViTModel",
    "image_size": [8, 8],
    "patch_size": [2, 2],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "filter_size": 48,
    "layerscale_value": 0.5,
    "use_masked_patches": True,
    "interpolate_position_embedding": {"interpolate_offset": 0.1},
}
HEAD = {
    "name": "DinoHead",
    "input_size": 32,
    "hidden_size": 24,
    "bottleneck_size": 8,
    "output_size": 20,
    "norm_last_layer": False,
}
GLOBAL, LOCAL, MASKS = (
    f"ssl_transform.output('{name}')" for name in ("global_view", "local_view", "collated_masks")
)


def pair(part, source, target):
    return {"source": f"{part}.model({source})", "target": f"{part}.model({target})"}


MOMENTUM = {"scheduler_params": {"ema_decay_start": 0.8, "ema_decay_end": 1.0, "total_steps": 10}}
CONFIG = DinoConfig.model_validate(
    {
        "name": "dino",
        "image_model_trunks": [
            {"image_model": TRUNK, "forward_args": [[GLOBAL, None, None]], "stop_grad": True},
            {
                "image_model": {**TRUNK, "stochastic_depth_drop_prob": 0.3},
                "forward_args": [[GLOBAL, None, MASKS], [LOCAL, None, None]],
            },
        ],
        "heads": [
            {
                "head_model": HEAD,
                "forward_args": [["image_model_trunks.output(0,0,1)"], ["image_model_trunks.output(0,0,0)"]],
                "stop_grad": True,
            },
            {
                "head_model": HEAD,
                "forward_args": [
                    [f"image_model_trunks.output({each})"] for each in ("1,0,1", "1,1,1", "1,0,0")
                ],
            },
        ],
        "losses": [
            {
                "loss": {"name": "DinoDistillationLoss", "input_size": 20, "warmup_teacher_temp_steps": 3},
                "forward_args": [["heads.output(1,0,0)", "heads.output(0,0,0)", "heads.output(1,1,0)"]],
            },
            {
                "loss": {"name": "iBOTPatchLoss", "input_size": 20},
                "forward_args": [["heads.output(0,1,0)", "heads.output(1,2,0)", MASKS]],
            },
            {"loss": {"name": "KoLeoLoss"}, "forward_args": [["image_model_trunks.output(1,0,1)"]]},
        ],
        "copy_init_weights": [pair("image_model_trunks", 0, 1), pair("heads", 0, 1)],
        "ema": [{**pair(part, 1, 0), **MOMENTUM} for part in ("image_model_trunks", "heads")],
        "freeze": ["image_model_trunks.model.0.*", "heads.model.0.*"],
    }
)
AVERAGES = [Average(*each) for each in FAMILIES["dino"].averages(CONFIG)]


def batch(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return {
        "global_view": torch.randn(3, 2, 3, 8, 8, generator=generator),
        "local_view": torch.randn(3, 4, 3, 4, 6, generator=generator),
        "collated_masks": torch.rand(3, 2, 16, generator=generator) < 0.4,
    }


@torch.no_grad()
def follow(model, step):
    """Update the teacher's moving average in plain PyTorch."""
    for part in (model.image_model_trunks, model.heads):
        for ours, theirs in zip(part.model[0].parameters(), part.model[1].parameters(), strict=True):
            kept = CONFIG.ema[0].momentum(step + 1)
            ours.mul_(kept).add_(theirs, alpha=1 - kept)


def job(**changes):
    return Job(
        lambda: build_model(CONFIG),
        batch,
        lambda model, batch: model(batch),
        after_plain_step=follow,
        after_streamed_step=lambda engine, step: MovingAverages(engine.store, AVERAGES).after_update(
            step + 1
        ),
        **changes,
    )


@functools.cache
def plain(micro_batches):
    return train_plain(job(micro_batches=micro_batches), steps=3)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "setting",
    [Setting("memory", 2), Setting("disk", 2, "recompute"), Setting(slabs=99, in_place=True)],
    ids=str,
)
def test_a_streamed_model_equals_plain_pytorch(setting, micro_batches, tmp_path):
    expected = plain(micro_batches)
    assert len(set(expected.losses)) == 3 and expected.buffers
    assert_equal(train_streamed(job(micro_batches=micro_batches), setting, tmp_path, steps=3), expected)


def test_the_teacher_moves_towards_the_student():
    start, weights = dict(build_model(CONFIG).named_parameters()), plain(1).weights
    for name, value in weights.items():
        if name.endswith("ffn.output.weight") and ".model.0." in name:
            student = weights[name.replace("model.0.", "model.1.")]
            assert not torch.equal(value, student) and not torch.equal(value, start[name])
            assert (value - student).norm() < (start[name] - student).norm()


def test_averages_of_trained_or_missing_parameters_are_refused(tmp_path):
    with make_engine(job(), Setting("memory", 2), tmp_path) as engine:
        with pytest.raises(ConfigError, match="so it must not be trained"):
            MovingAverages(engine.store, [Average("heads.model.0.", "heads.model.1.", lambda step: 0.5)])
        with pytest.raises(ConfigError, match="is to be the average of"):
            MovingAverages(engine.store, [Average("heads.model.7.", "heads.model.0.", lambda step: 0.5)])
