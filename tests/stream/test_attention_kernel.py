"""Training in bf16 with the package's kernel of attention: one result in every plan, close to torch's."""

import functools

import pytest
import torch
from harness import Job, Setting, train_streamed

from headwater.config.models.decoder import DecoderConfig
from headwater.core.attention import attention_kernel_available
from headwater.core.precision import Precision
from headwater.models.layers.attention import use_torch_attention
from headwater.models.registry import build_model
from headwater.optim.spec import OptimizerSpec

BF16 = Precision("bf16")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 48,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
FAMILIES = {"gpt2": {}, "llama": {"extra_attention_params": {"num_kv_groups": 2}}}


def text(step, index):
    """Return repeated text that a model can learn."""
    starts = torch.randint(0, 61, (4, 1), generator=torch.Generator().manual_seed(100 * step + index))
    tokens = (starts + 7 * torch.arange(49)) % 61
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": torch.ones(4, 48)}


def job(family, change=lambda model: None):
    config = DecoderConfig.model_validate({"name": family, **SIZES, **FAMILIES[family]})

    def make_model():
        model = build_model(config)
        change(model)
        return model

    return Job(
        make_model, text, lambda model, batch: model(batch), optimizer=OptimizerSpec("AdamW", {"lr": 3e-3})
    )


@functools.cache
def in_place(family, folder, steps):
    return train_streamed(job(family), Setting(in_place=True, precision=BF16), folder, steps=steps)


def kernels(model):
    """Return the names of the operators of attention in a forward."""
    with torch.profiler.profile(acc_events=True) as profile, torch.autocast("cpu", torch.bfloat16):
        model(text(0, 0))
    return {event.key for event in profile.key_averages() if "attention" in event.key}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_follow_those_with_torchs_kernel(family, tmp_path):
    with_kernel = in_place(family, tmp_path, 20)
    without = train_streamed(
        job(family, use_torch_attention), Setting(in_place=True, precision=BF16), tmp_path, steps=20
    )
    assert with_kernel.losses[-1] < 0.9 * with_kernel.losses[0]
    torch.testing.assert_close(
        torch.tensor(with_kernel.losses), torch.tensor(without.losses), rtol=0.01, atol=0.0
    )


@pytest.mark.parametrize(
    "setting",
    [
        Setting("memory", 2, precision=BF16),
        Setting("memory", 99, "offload", precision=BF16),
        Setting("disk", 2, "recompute", "disk", precision=BF16),
        Setting("disk", 3, precision=BF16, in_memory=(1,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_computes_the_same_bits(family, setting, tmp_path):
    expected = in_place(family, tmp_path, 3)
    run = train_streamed(job(family), setting, tmp_path, steps=3)
    assert (run.losses, run.norms) == (expected.losses, expected.norms)
    assert all(torch.equal(run.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_use_the_kernel_unless_told_otherwise(family):
    model = job(family).model()
    assert ("headwater::attention" in kernels(model)) == attention_kernel_available()
    use_torch_attention(model)
    assert "headwater::attention" not in kernels(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_train_with_the_kernel(family, tmp_path):
    expected = in_place(family, tmp_path, 3)
    setting = Setting("memory", 2, "recompute", precision=BF16, compiled=True)
    run = train_streamed(job(family), setting, tmp_path, steps=3)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected.losses), rtol=0.01, atol=0.0)
