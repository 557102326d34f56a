"""Params files of a family: sizes, learning rates that transfer, and bad settings."""

import dataclasses
import math

import pytest
import yaml

from headwater.config.run import load_params
from headwater.core.errors import ConfigError, RunError
from headwater.models.registry import learning_rate_scale
from headwater.scaling.family import Family, write_family
from headwater.scaling.sizes import read_family, read_sizes, size_of
from headwater.trainer.session import fit

SETTINGS = Family(base="", widths=(16, 32, 64), depths=(1, 2, 2), tokens_per_parameter=20)


def family(base, **changes):
    return dataclasses.replace(SETTINGS, base=str(base), **changes)


def test_lengths_follow_from_parameters(base, tmp_path):
    write_family(family(base), tmp_path / "out")
    for size in read_family(tmp_path / "out"):
        assert size.tokens / size.parameters == pytest.approx(20, rel=0.1)
        assert size.tokens >= 20 * size.parameters
        assert size.model.head_size == 8 and size.model.ffn_size == 4 * size.model.hidden_size
        assert size.model_dir == tmp_path / "out" / size.name
        assert load_params(size.params).init.loop.end_step(0) == size.steps


def test_mup_keeps_the_learning_rate_and_divides_that_of_matrices(base, tmp_path):
    write_family(family(base, parametrization="mup"), tmp_path / "out")
    small, _, large = read_family(tmp_path / "out")
    assert small.learning_rate == large.learning_rate == pytest.approx(1e-2)
    for size, factor in ((small, 1.0), (large, 0.25)):
        assert learning_rate_scale("blocks.0.attention.qkv.weight", size.model) == factor
        assert learning_rate_scale("blocks.0.ffn.output.weight", size.model) == factor
        assert learning_rate_scale("embedding.weight", size.model) == 1.0
        assert size.model.logits_scale == factor


def test_a_size_of_the_bases_shape_trains_as_the_base_with_mup(base, tmp_path):
    (file,) = write_family(family(base, widths=(16,), depths=(1,)), tmp_path / "out")
    losses = []
    for path in (file, base):
        overrides = {"max_steps": 2, "model_dir": str(tmp_path / path.stem), "learning_rate": 1e-2}
        config = load_params(path, overrides)
        schedule = {"trainer.init.schedulers": [{"ConstantLR": {"learning_rate": 1e-2}}]}
        config = load_params(path, {**overrides, **schedule})
        fit(config)
        losses.append((tmp_path / path.stem / "history.jsonl").read_text().count("train"))
        losses.append([record["loss"] for record in records(tmp_path / path.stem)])
    assert losses[1] == losses[3] and losses[0] == losses[2] == 2


def records(folder):
    from headwater.trainer.history import read_history

    return [record for record in read_history(folder / "history.jsonl") if record["kind"] == "train"]


def test_standard_rates_fall_with_compute(base, tmp_path):
    write_family(family(base, parametrization="standard"), tmp_path / "out")
    small, _, large = read_family(tmp_path / "out")
    assert small.learning_rate == pytest.approx(1e-2)
    assert small.model.mup_base_hidden_size is None
    # The numbers of tokens are rounded to whole steps.
    expected = 1e-2 * (large.flops / small.flops) ** -0.125
    assert large.learning_rate == pytest.approx(expected, rel=0.02)


def test_given_rate_replaces_that_of_the_base(base, tmp_path):
    write_family(family(base, learning_rate=3e-3), tmp_path / "out")
    assert {size.learning_rate for size in read_family(tmp_path / "out")} == {3e-3}


def test_shipped_base_is_named(tmp_path):
    (file,) = write_family(Family("gpt/cerebras_gpt_111m_mup", (1024,), (10,), 20), tmp_path / "out")
    assert yaml.safe_load(file.read_text())["extends"] == "gpt/cerebras_gpt_111m_mup"
    (size,) = read_sizes([file])
    # The base has muP already: its own base width stays.
    assert size.model.mup_base_hidden_size == 256 and size.model.embeddings_scale == 10.0
    assert size.learning_rate == 6e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (16, 32), "depths": (1, 2, 3)}, "one depth for each of 2 widths"),
        ({"widths": (16, 16), "depths": (1, 1)}, "width 16 with depth 1 twice"),
        ({"widths": (20,), "depths": (1,)}, "multiples of the base's head size 8"),
        ({"tokens_per_parameter": 0}, "positive"),
        ({"tokens_per_parameter": math.inf}, "positive, finite"),
        ({"widths": (0,), "depths": (1,)}, "positive"),
        ({"learning_rate": 0.0}, "expected a positive, finite learning rate, got 0"),
        ({"learning_rate": math.nan}, "expected a positive, finite learning rate, got nan"),
    ],
)
def test_bad_settings(base, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        write_family(family(base, **changes), tmp_path / "out")
    assert caught.value.remedy and not (tmp_path / "out").exists()


def test_a_family_that_is_not_valid_leaves_no_files(base, tmp_path):
    with pytest.raises(ConfigError, match="64 bits"):
        write_family(family(base, tokens_per_parameter=1e300), tmp_path / "out")
    assert len(write_family(family(base), tmp_path / "out")) == 3


def test_a_file_at_the_path_of_the_folder_is_an_error(base, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(RunError, match="expected a folder or nothing, found a file"):
        write_family(family(base), tmp_path / "out")


def test_folder_with_params_files_is_not_overwritten(base, tmp_path):
    write_family(family(base), tmp_path / "out")
    with pytest.raises(ConfigError, match="expected a new folder"):
        write_family(family(base), tmp_path / "out")


def test_base_without_validation_data_is_refused(base, tmp_path):
    text = base.read_text()
    base.write_text(text[: text.index("    val_dataloader")] + "    val_dataloader: []\n")
    with pytest.raises(ConfigError, match="found no val_dataloader") as caught:
        write_family(family(base), tmp_path / "out")
    assert "fit.val_dataloader" in caught.value.remedy and str(base) in caught.value.where
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("bert/tiny", "expected a decoder"),
        ("mixtral/tiny", "does not cover experts"),
    ],
)
def test_models_without_a_formula_are_refused(tmp_path, params, message):
    with pytest.raises(ConfigError, match=message):
        write_family(Family(params, (64,), (1,), 20), tmp_path / "out")


def test_run_of_unknown_length_is_refused(base):
    config = load_params(base, {"trainer.init.loop": {"num_epochs": 1}})
    loop = config.init.loop.model_copy(update={"max_steps": None})
    config = dataclasses.replace(config, init=config.init.model_copy(update={"loop": loop}))
    with pytest.raises(ConfigError, match="max_steps"):
        size_of(config)
