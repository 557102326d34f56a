"""Sparse training by params: masks by public names, kept in checkpoints, exact after an interruption."""

import gc
import re
from collections import Counter

import pytest
import torch
import yaml
from run_samples import assert_same_checkpoint, history, losses
from safetensors.torch import load_file

from headwater.core.units import format_count
from headwater.sparsity import products
from headwater.trainer.pretrained import checkpoint_weights
from headwater.trainer.sparse import SparseTraining

RIGL = {
    "sparsity": 0.75,
    "algorithm": "rigl",
    "drop_fraction": {"type": "cosine", "init": 0.3, "half_period": 6},
    "update": {"freq": 2},
    "param_filter": ["*proj_[qk]_dense_layer.weight", "*linear_layer.weight"],
}


@pytest.fixture
def sparse_params(params):
    tree = yaml.safe_load(params.read_text())
    tree["trainer"]["init"]["sparsity"] = RIGL
    params.write_text(yaml.safe_dump(tree))
    return params


def zeros(model_dir, step):
    weights = dict(checkpoint_weights(model_dir / f"checkpoint_{step}"))
    return {name: (value == 0) for name, value in weights.items() if "blocks" in name and value.dim() == 2}


def test_a_resumed_run_has_the_masks_of_an_uninterrupted_run(headwater, sparse_params, tmp_path):
    assert headwater("fit", sparse_params)[0] == 0
    other = f"--trainer.init.model_dir={tmp_path / 'other'}"
    assert headwater("fit", sparse_params, other, "--trainer.init.loop.max_steps=3")[0] == 0
    assert headwater("fit", sparse_params, other)[0] == 0
    assert_same_checkpoint(tmp_path / "run/checkpoint_6", tmp_path / "other/checkpoint_6")
    assert history(tmp_path / "run")[-1]["loss"] == history(tmp_path / "other")[-1]["loss"]
    early, late = zeros(tmp_path / "run", 3), zeros(tmp_path / "run", 6)
    for name, masked in late.items():
        if "qkv" in name:
            assert [int(part.sum()) for part in masked.split(32)] == [768, 768, 0]
        elif "ffn" in name:
            assert int(masked.sum()) == 0.75 * masked.numel()
        else:
            assert not masked.any()
    assert not all(torch.equal(early[name], late[name]) for name in late)


def test_a_changed_mask_leaves_no_copy_of_an_older_one(headwater, sparse_params, monkeypatch):
    train, found = SparseTraining.before_update, []
    num_bytes = {3 * 32 * 32 // 8, 32 * 128 // 8}  # of the bits of a matrix

    def counted(self, step):
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        bits = {
            each.data_ptr() for each in tensors if each.dtype == torch.uint8 and each.numel() in num_bytes
        }
        found.append((step, len(bits)))
        train(self, step)

    monkeypatch.setattr(SparseTraining, "before_update", counted)
    for steps in (3, 6):  # the second run begins with the masks of a checkpoint
        assert headwater("fit", sparse_params, f"--trainer.init.loop.max_steps={steps}")[0] == 0
    matrices = 2 * 3  # of each of two blocks
    assert found == [(step, matrices) for step in range(1, 7)]


def test_all_ranks_change_masks_equally(headwater, sparse_params, tmp_path):
    two, disk = "--num_csx=2", ("--trainer.init.backend.tier=disk", f"--disk={tmp_path / 'disk'}")

    def fit(name, *options, steps=6):
        run = (f"--trainer.init.model_dir={tmp_path / name}", f"--trainer.init.loop.max_steps={steps}")
        code, output, error = headwater("fit", sparse_params, *options, *run)
        assert code == 0, output + error

    fit("one", "--trainer.init.backend.micro_batch_size=4")
    fit("two", two)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    theirs = zeros(tmp_path / "one", 6)
    for name, masked in zeros(tmp_path / "two", 6).items():
        assert torch.equal(masked, theirs[name]), name
    fit("disk", two, "--trainer.init.backend.num_slabs=8", *disk, steps=3)
    fit("disk", two, "--num_memx=1")
    assert_same_checkpoint(tmp_path / "two/checkpoint_6", tmp_path / "disk/checkpoint_6")
    fit("disk", steps=7)
    assert history(tmp_path / "disk")[-1]["step"] == 7


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--trainer.init.sparsity.param_filter=[nothing]"], "no trainable parameter matches nothing"),
        (["--trainer.init.sparsity.algorithm=rigel"], "algorithm"),
        (["--trainer.init.sparsity.update=null"], "rigl needs update"),
        (["--trainer.init.optimizer={Adafactor: {}}"], "Adafactor does not update each weight by itself"),
    ],
)
def test_invalid_combinations_are_refused(headwater, sparse_params, keys, message):
    code, _, error = headwater("fit", sparse_params, *keys)
    assert code != 0
    assert message in " ".join(error.split())


def test_other_masks_in_the_checkpoint_are_refused(headwater, sparse_params):
    assert headwater("fit", sparse_params, "--trainer.init.loop.max_steps=3")[0] == 0
    code, _, error = headwater(
        "fit", sparse_params, "--trainer.init.sparsity.param_filter=['*linear_layer.weight']"
    )
    assert code != 0
    assert "masks in the checkpoint" in " ".join(error.split())


def test_a_plan_leaves_out_the_state_of_masked_weights_on_one_rank(headwater, sparse_params):
    # Queries and keys, and both layers of the feed-forward network, in two blocks.
    masked = 2 * (0.75 * 2 * 32 * 32 + 0.75 * 2 * 32 * 128)
    said = f"masked weights: {masked / 1000:.1f} k without optimizer state"
    assert said in headwater("plan", sparse_params)[1]
    assert "masked weights" not in headwater("plan", sparse_params, "--num_csx=2")[1]
    bf16_state = "--trainer.init.backend.optimizer_state=bf16"
    assert "masked weights" not in headwater("plan", sparse_params, bf16_state)[1]


def test_the_plan_of_a_continued_run_counts_the_masks_of_its_checkpoint(headwater, sparse_params, tmp_path):
    gmp = {
        "sparsity": {"type": "linear", "init": 0.25, "slope": 0.25},
        "algorithm": "gmp",
        "update": {"freq": 1},
        "param_filter": ["*linear_layer.weight"],
    }
    tree = yaml.safe_load(sparse_params.read_text())
    tree["trainer"]["init"]["sparsity"] = gmp
    sparse_params.write_text(yaml.safe_dump(tree))
    weights = 2 * 2 * 32 * 128  # in two layers of two blocks

    def masked(command, *options):
        code, output, error = headwater(command, sparse_params, *options)
        assert code == 0, output + error
        return re.search(r"masked weights: (.*?) without", output)[1]

    last = "--trainer.init.loop.max_steps=2"
    assert masked("plan") == masked("fit", last) == format_count(weights // 4)
    other = f"--trainer.init.model_dir={tmp_path / 'other'}"
    assert masked("plan", other) == format_count(weights // 4), "another run starts with its first masks"
    three_quarters = format_count(weights * 3 // 4)
    assert masked("plan", other, f"--checkpoint_path={tmp_path / 'run/checkpoint_2'}") == three_quarters
    assert masked("plan") == masked("fit", "--trainer.init.loop.max_steps=3") == three_quarters


@pytest.mark.parametrize("precision", [(), ("--trainer.init.precision.enabled=true",)], ids=["fp32", "bf16"])
def test_a_run_on_changing_tiers_has_the_checkpoint_of_an_uninterrupted_run(
    precision, headwater, sparse_params, tmp_path
):
    backend, disk = "--trainer.init.backend", tmp_path / "disk"
    on_disk = (f"{backend}.tier=disk", f"--disk={disk}")

    def fit(name, *options, steps=6):
        run = (f"--trainer.init.model_dir={tmp_path / name}", f"--trainer.init.loop.max_steps={steps}")
        code, output, error = headwater("fit", sparse_params, *precision, *options, *run)
        assert code == 0, output + error

    fit("memory", f"{backend}.tier=memory")
    fit("mixed", *on_disk, steps=3)
    fit("mixed", *on_disk, f"{backend}.stages_in_memory=2", steps=5)
    fit("mixed")
    assert_same_checkpoint(tmp_path / "memory/checkpoint_6", tmp_path / "mixed/checkpoint_6")
    # Masks and state of masked weights are the same, too.
    for one, other in zip(
        sorted((tmp_path / "memory/checkpoint_6").iterdir()),
        sorted((tmp_path / "mixed/checkpoint_6").iterdir()),
        strict=True,
    ):
        assert one.name == other.name
        if one.suffix == ".safetensors":
            theirs = load_file(other)
            assert all(torch.equal(value, theirs[name]) for name, value in load_file(one).items()), one.name


@pytest.mark.parametrize("precision", [(), ("--trainer.init.precision.enabled=true",)], ids=["fp32", "bf16"])
def test_fast_products_skip_masked_weights_and_rigl_still_sees_their_gradients(
    precision, headwater, sparse_params, tmp_path, monkeypatch
):
    computed, product = Counter(), products._product

    def counted(name, *args, **options):
        computed[name] += 1
        return product(name, *args, **options)

    monkeypatch.setattr(products, "_product", counted)
    monkeypatch.setattr(products, "_is_faster", lambda *_: True)  # these layers are small

    def fit(name, *options):
        run = (f"--trainer.init.model_dir={tmp_path / name}", *precision, *options)
        code, output, error = headwater("fit", sparse_params, *run)
        assert code == 0, output + error

    fit("exact")
    assert not computed
    fit("fast", "--trainer.init.backend.matmul=fast")
    layers, steps, changes = 2 * 3, 6, 3
    assert computed == {
        "masked_forward": layers * steps,
        "masked_input_gradient": layers * steps,
        "masked_weight_gradient": layers * (steps - changes),
    }
    rel = 1e-5 if not precision else 1e-2
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "exact"), rel=rel)
    ours, theirs = zeros(tmp_path / "fast", 6), zeros(tmp_path / "exact", 6)
    for name, masked in ours.items():
        assert int(masked.sum()) == int(theirs[name].sum()), name
        # Where gradients are nearly equal, rounding decides which weights `rigl` frees.
        assert float((masked != theirs[name]).double().mean()) < 0.02, name
    backend = "--trainer.init.backend"
    for kept in ("recompute", "selective"):
        on_disk = f"{backend}.tier=disk", f"--disk={tmp_path}/disk"
        fit(kept, f"{backend}.matmul=fast", f"{backend}.activations={kept}", *on_disk)
        assert_same_checkpoint(tmp_path / "fast/checkpoint_6", tmp_path / kept / "checkpoint_6")
