"""Diffusion and self-supervised models on the command line: training and resuming."""

import json
import os

import numpy as np
import pytest
import torch
import yaml
from run_samples import assert_same_checkpoint

from headwater.trainer.pretrained import checkpoint_weights

Image = pytest.importorskip("PIL.Image")

TRUNK = {
    "name": "MultiImageViTModel",
    "image_size": [16, 16],
    "patch_size": [4, 4],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 48,
    "use_masked_patches": True,
    "interpolate_position_embedding": {"local_patch_dims": [2, 2]},
}
HEAD = {"name": "DinoHead", "input_size": 32, "hidden_size": 24, "bottleneck_size": 8, "output_size": 20}
VIEWS, SMALL, MASKS = (
    f"ssl_transform.output('{name}')" for name in ("global_view", "local_view", "collated_masks")
)
PAIRS = [
    {"source": f"{part}.model(1)", "target": f"{part}.model(0)"} for part in ("image_model_trunks", "heads")
]
MOMENTUM = {"scheduler_params": {"ema_decay_start": 0.9, "ema_decay_end": 1.0, "total_steps": 20}}
DINO = {
    "name": "dino",
    "image_model_trunks": [
        {"image_model": TRUNK, "forward_args": [[VIEWS, None, None]], "stop_grad": True},
        {"image_model": TRUNK, "forward_args": [[VIEWS, None, MASKS], [SMALL, None, None]]},
    ],
    "heads": [
        {"head_model": HEAD, "forward_args": [["image_model_trunks.output(0,0,1)"]], "stop_grad": True},
        {
            "head_model": HEAD,
            "forward_args": [["image_model_trunks.output(1,0,1)"], ["image_model_trunks.output(1,1,1)"]],
        },
    ],
    "losses": [
        {
            "loss": {"name": "DinoDistillationLoss", "input_size": 20, "warmup_teacher_temp_steps": 5},
            "forward_args": [["heads.output(1,0,0)", "heads.output(0,0,0)", "heads.output(1,1,0)"]],
        }
    ],
    "copy_init_weights": PAIRS,
    "ema": [{**pair, **MOMENTUM} for pair in PAIRS],
    "freeze": ["image_model_trunks.model.0.*", "heads.model.0.*"],
}
PATCHES = "image_model_trunks.output({},0,0)"
OF_WHOLE_BATCHES = {
    **DINO,
    "heads": [
        {**head, "forward_args": [*head["forward_args"], [PATCHES.format(number)]]}
        for number, head in enumerate(DINO["heads"])
    ],
    "losses": [
        *DINO["losses"],
        {
            "loss": {"name": "iBOTPatchLoss", "input_size": 20},
            "forward_args": [["heads.output(0,1,0)", "heads.output(1,2,0)", MASKS]],
        },
        {"loss": {"name": "KoLeoLoss"}, "forward_args": [["image_model_trunks.output(1,0,1)"]]},
    ],
}
"""Centers are of all samples, and each sample looks for its nearest among all others."""
DIT = {
    "name": "dit",
    "num_classes": 2,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 48,
    "vae": {"latent_size": [8, 8], "latent_channels": 2, "scaling_factor": 1.0},
}


def pictures(folder):
    for number in range(8):
        place = folder / "train" / "cat"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    crops = {
        "global_image_size": 16,
        "local_image_size": 8,
        "local_num_crops": 2,
        "multicrop_transform_list": [{"name": "random_horizontal_flip"}, {"name": "to_tensor"}],
    }
    masks = {"image_size": 16, "patch_size": 4}
    views = {"multi_crop_transform": crops, "masked_patch_transform": masks}
    return {
        "data_processor": "DinoImageDataProcessor",
        "dataset": {"name": "Imagenet", "root": str(folder)},
        "ssl_transform": {"name": "Dinov2Transform", **views},
    }


def latents(folder):
    for number, label in enumerate(("cat", "dog") * 4):
        place = folder / "train" / label
        place.mkdir(parents=True, exist_ok=True)
        stored = np.zeros((4, 8, 8), dtype=np.float32)
        stored[:2] = 1 if label == "cat" else -1
        stored[2:] = -20
        np.savez(place / f"{number}.npz", vae_output=stored)
    return {"data_processor": "DiffusionLatentImageNet1KProcessor", "data_dir": str(folder)}


def run_params(path, model, section, folder, steps, *, every=10):
    """Write the params file of a run."""
    init = {
        "model_dir": str(folder),
        "seed": 1,
        "model": model,
        "optimizer": {"AdamW": {"learning_rate": 3e-3, "weight_decay": 0.01}},
        "loop": {"max_steps": steps},
        "checkpoint": {"steps": every},
        "logging": {"log_steps": 1},
    }
    path.write_text(yaml.safe_dump({"trainer": {"init": init, "fit": {"train_dataloader": section}}}))
    return path


@pytest.mark.parametrize(("model", "data"), [(DINO, pictures), (DIT, latents)], ids=["dino", "dit"])
def test_a_self_supervised_run_resumes(headwater, tmp_path, model, data):
    section = {**data(tmp_path / "data"), "batch_size": 4, "shuffle": True}
    params = tmp_path / "params.yaml"

    def fit(folder, steps):
        run_params(params, model, section, tmp_path / folder, steps)
        code, _, err = headwater("fit", params)
        assert (code, err) == (0, "")

    fit("whole", 20)
    fit("parts", 10)
    fit("parts", 20)
    whole, parts = (
        dict(checkpoint_weights(tmp_path / each / "checkpoint_20")) for each in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    if model is DIT:
        records = (tmp_path / "whole" / "history.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, records) if "loss" in record]
        assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    else:
        name = "image_model_trunks.model.{}.blocks.0.ffn.output.weight"
        first = dict(checkpoint_weights(tmp_path / "parts" / "checkpoint_10"))
        teacher, before, student = whole[name.format(0)], first[name.format(0)], whole[name.format(1)]
        assert not torch.equal(teacher, student) and (teacher - student).norm() < (before - student).norm()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_two_ranks_have_the_centers_and_the_teacher_of_a_single_rank(headwater, tmp_path):
    section = {**pictures(tmp_path / "data"), "batch_size": 4, "shuffle": True}
    disk = ("--trainer.init.backend.tier=disk", f"--disk={tmp_path / 'disk'}")
    runs = {"one": (), "two": ("--num_csx=2",), "store": ("--num_csx=2", "--num_memx=1", *disk)}
    for name, options in runs.items():
        folder = tmp_path / name
        params = run_params(tmp_path / "run.yaml", OF_WHOLE_BATCHES, section, folder, 4, every=4)
        assert headwater("fit", params, *options)[0] == 0
    one, two, store = (
        [json.loads(line)["loss"] for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        for name in runs
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert store == two
    assert_same_checkpoint(tmp_path / "store" / "checkpoint_4", tmp_path / "two" / "checkpoint_4")
    weights = [dict(checkpoint_weights(tmp_path / name / "checkpoint_4")) for name in ("one", "two")]
    # Where a true gradient is zero, as of the keys' bias, Adam makes much of rounding.
    teacher = [name for name, value in weights[0].items() if ".model.0." in name and value.dim() > 1]
    assert teacher
    for name in teacher:
        torch.testing.assert_close(weights[1][name], weights[0][name], rtol=1e-3, atol=1e-5)
