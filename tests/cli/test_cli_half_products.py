"""Runs in bf16 on processors that have no instructions for it."""

import pytest
import torch
from run_samples import history, model_dir

from headwater.core import half_products, kernels

BF16 = "--trainer.init.precision.enabled=true"


@pytest.fixture
def converted(monkeypatch):
    """Makes bf16 slow on every processor; returns the sizes of products that fp32 kernels compute."""
    for module in (half_products, kernels):
        monkeypatch.setattr(module, "slow_half_dtypes", lambda: frozenset({torch.bfloat16}))
    sizes, piece = [], half_products._piece

    def counted(*size):
        sizes.append(size)
        return piece(*size)

    monkeypatch.setattr(half_products, "_piece", counted)
    return sizes


def test_a_run_in_bf16_multiplies_by_fp32_kernels_and_its_plan_says_so(
    headwater, params, converted, tmp_path
):
    assert headwater("fit", params, BF16)[0] == 0
    assert converted
    assert "products in bf16: by fp32 kernels" in (tmp_path / "run/plan.txt").read_text()
    converted.clear()
    torch.ones(8, 8, dtype=torch.bfloat16) @ torch.ones(8, 8, dtype=torch.bfloat16)
    assert headwater("fit", params, model_dir(tmp_path / "fp32"))[0] == 0
    exact = tmp_path / "exact"
    assert headwater("fit", params, BF16, "--trainer.init.backend.matmul=exact", model_dir(exact))[0] == 0
    assert "fp32 kernels" not in (exact / "plan.txt").read_text()
    assert not converted
    ours, torchs = ([row["loss"] for row in history(each)] for each in (tmp_path / "run", exact))
    assert ours == pytest.approx(torchs, rel=0.01)


def test_a_resumed_run_in_bf16_multiplies_by_fp32_kernels_to_the_same_bits(
    headwater, params, converted, tmp_path
):
    assert headwater("fit", params, BF16)[0] == 0
    stopped = tmp_path / "stopped"
    assert headwater("fit", params, BF16, model_dir(stopped), "--max_steps=3")[0] == 0
    assert headwater("fit", params, BF16, model_dir(stopped))[0] == 0
    assert history(stopped) == history(tmp_path / "run")


def test_a_run_that_continues_with_other_kernels_of_products_warns(headwater, params, converted):
    changes = []
    for number, matmul in enumerate(("auto", "auto", "exact", "fast", "auto"), start=1):
        options = BF16, f"--trainer.init.backend.matmul={matmul}", f"--max_steps={number}"
        code, _, error = headwater("fit", params, *options)
        assert code == 0, error
        changes.append(error.partition("matrix products were computed by ")[2].partition(" up to step")[0])
    assert changes == ["", "", "fp32 kernels", "torch's kernels", "the kernels of matmul: fast"]
