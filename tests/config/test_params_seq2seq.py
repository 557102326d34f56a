"""Params files of encoder-decoders: public files load, and their models have the published sizes."""

from importlib.resources import files

import pytest
import torch
import yaml
from params_samples import public_params
from pydantic import TypeAdapter

from headwater.config import load_params
from headwater.config.data import AnyData, SpanCorruptionDataConfig, TranslationDataConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.config.optimizers import OptimizerConfig
from headwater.models.registry import build_model

# Parameters of T5 (arXiv:1910.10683, section 3.7), and of the first transformer (arXiv:1706.03762, table 3).
SIZES = {
    "t5/t5_11B": (11.31e9, 0.01),
    "t5/t5_11B_muP": (11.31e9, 0.01),
    "t5/t5_3B": (2.85e9, 0.01),
    "transformer/transformer_base": (65e6, 0.05),
    "transformer/transformer_large": (213e6, 0.02),
}


def sections(name):
    """The model and the loaders of a public file."""
    family, file = name.split("/")
    trainer = yaml.safe_load((public_params("nlp", family, "configs") / f"{file}.yaml").read_text())[
        "trainer"
    ]
    loaders = [trainer["fit"]["train_dataloader"], trainer["fit"]["val_dataloader"]]
    return (
        Seq2SeqConfig.model_validate(trainer["init"]["model"]),
        [TypeAdapter(AnyData).validate_python(loader) for loader in loaders],
    )


@pytest.mark.parametrize("name", SIZES)
def test_public_models_have_the_published_size(name):
    model, loaders = sections(name)
    expected, tolerance = SIZES[name]
    count = sum(parameter.numel() for parameter in build_model(model, device="meta").parameters())
    assert count == pytest.approx(expected, rel=tolerance)
    schema = SpanCorruptionDataConfig if model.name == "t5" else TranslationDataConfig
    for loader in loaders:
        assert isinstance(loader, schema) and loader.extra_ids == model.extra_ids
        assert loader.src_max_sequence_length == model.src_max_position_embeddings
        assert loader.tgt_max_sequence_length == model.tgt_max_position_embeddings


def test_mup_of_the_public_file():
    model, _ = sections("t5/t5_11B_muP")
    assert (model.width_ratio, model.filter_ratio) == (2, 32)
    assert model.attention_scale("encoder") == pytest.approx(4 / 128 / 2)
    assert model.embeddings_scale == pytest.approx(14.6 * 32)
    assert model.logits_scale == pytest.approx(2.22 / 2**0.5)


@pytest.mark.parametrize("name", SIZES)
def test_public_files_load(name):
    family, file = name.split("/")
    init = load_params(public_params("nlp", family, "configs") / f"{file}.yaml").init
    assert init.model.lm_loss_weight == {"t5": 0.015, "transformer": 0.033}[family]
    if family == "t5":
        warmup = 3870 if file == "t5_3B" else 8307
        assert init.schedule.value(0) == init.schedule.value(warmup) == pytest.approx(warmup**-0.5)
        assert init.schedule.value(4 * warmup) == pytest.approx(warmup**-0.5 / 2)
        assert init.optimizer_spec.name == "Adafactor"
    else:
        assert init.schedule.value(4000) > init.schedule.value(100000) > 0


def test_adafactor_is_torchs():
    """An update by the section's arguments, and by torch's own with the same."""
    section = {"Adafactor": {"beta2_decay": -0.6, "eps": [None, 1e-2], "d": 2.0, "weight_decay": 0.1}}
    spec = OptimizerConfig.model_validate(section).spec(0.05)
    updated = []
    for make in (
        spec.build,
        lambda params: torch.optim.Adafactor(
            params, lr=0.05, beta2_decay=-0.6, eps=(None, 1e-2), d=2.0, weight_decay=0.1
        ),
    ):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(5, 3))
        optimizer = make([weight])
        for _ in range(3):
            weight.grad = torch.randn(5, 3)
            optimizer.step()
        updated.append(weight.detach())
    assert torch.equal(*updated)


def test_the_shipped_file_loads():
    run = load_params(files("headwater") / "params" / "transformer" / "tiny_multi30k.yaml")
    assert run.init.model.name == "transformer" and run.fit.train_dataloader.tgt_data_dir is not None
