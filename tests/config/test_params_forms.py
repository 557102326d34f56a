"""Both forms of a params file mean the same run."""

import re
from pathlib import Path

import pytest
from params_samples import NEWER, OLDER, public_params, write

from headwater.config import load_params
from headwater.core.errors import ConfigError
from headwater.core.precision import Precision
from headwater.optim import CosineDecay, Linear, Sequential


def keys_without_effect(path):
    """Return the keys that notices report as without effect, after checking their lines."""
    keys = []
    for notice in load_params(path).notices:
        match = re.fullmatch(rf"{re.escape(str(path))}, line (\d+): (\S+) has no effect: .+", notice)
        assert match, notice
        line = path.read_text().splitlines()[int(match[1]) - 1]
        assert f"{match[2].rsplit('.', 1)[1]}:" in line
        keys.append(match[2])
    return keys


def test_both_forms_give_equal_runs(newer, older):
    first, second = load_params(newer), load_params(older)
    assert first == second
    assert (first.notices, second.notices) == ((), ())
    assert first.source != second.source


def test_a_run_has_the_values_of_the_file(newer):
    init = load_params(newer).init
    assert init.model_dir == Path("runs/a")
    assert (init.seed, init.model.hidden_size, init.backend.num_csx) == (7, 32, 2)
    assert (init.backend.backend_type, init.backend.micro_batch_size) == ("CPU", 2)
    assert init.precision.precision == Precision("bf16")
    assert (init.keep_checkpoints, init.compute_norm, init.checkpoint_states) == (3, True, ("all",))
    assert init.schedule == Sequential((Linear(0.0, 1e-3, 10), CosineDecay(1e-3, 1e-4, 90)), (10,))
    spec = init.optimizer_spec
    assert (spec.name, spec.kwargs["betas"], spec.kwargs["weight_decay"]) == ("AdamW", (0.9, 0.95), 0.1)
    assert "correct_bias" not in spec.kwargs


def test_data_sections(newer):
    run = load_params(newer)
    assert run.fit is not None
    assert run.validation is not None
    assert run.fit.train_dataloader.data_dir == (Path("data/train"),)
    assert [loader.batch_size for loader in run.fit.val_dataloader] == [4]
    assert run.validation.val_dataloader == run.fit.val_dataloader[0]
    assert run.fit.ckpt_path == Path("old.mdl")


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("0.5", [0.5, 0.5]),
        ("{scheduler: Constant, learning_rate: 0.25}", [0.25, 0.25]),
        ("[{scheduler: linear, initial_learning_rate: 1, end_learning_rate: 0, decay_steps: 2}]", [1.0, 0.5]),
        ("{scheduler: CosineDecayLR, initial_learning_rate: 1, end_learning_rate: 0, steps: 2}", [1.0, 0.5]),
    ],
)
def test_older_learning_rates(tmp_path, rate, expected):
    start, end = OLDER.index("  learning_rate:\n"), OLDER.index("runconfig:")
    run = load_params(write(tmp_path, f"{OLDER[:start]}  learning_rate: {rate}\n{OLDER[end:]}"))
    assert [run.init.schedule.value(step) for step in (0, 1)] == pytest.approx(expected)


def test_a_rate_of_the_optimizer_is_a_constant_schedule(tmp_path):
    start, end = NEWER.index("    schedulers:\n    - Seq"), NEWER.index("    precision:")
    text = NEWER[:start] + NEWER[end:]
    run = load_params(write(tmp_path, text.replace("weight_decay: 0.1", "learning_rate: 0.01")))
    assert run.init.schedule.value(99) == 0.01
    assert run.init.optimizer_spec.kwargs["lr"] == 0.01


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        ("{enabled: false, loss_scaling_factor: 1.0}", Precision("fp32")),
        ("{fp16_type: float16, loss_scaling_factor: dynamic}", Precision("fp16", "dynamic")),
        ("{fp16_type: float16, loss_scaling_factor: 128.0}", Precision("fp16", 128.0)),
        ("{fp16_type: cbfloat16, loss_scaling_factor: dynamic}", Precision("bf16")),
    ],
)
def test_precision_sections_name_the_precision(tmp_path, section, precision):
    start, end = NEWER.index("    precision:"), NEWER.index("    loop:")
    run = load_params(write(tmp_path, f"{NEWER[:start]}    precision: {section}\n{NEWER[end:]}"))
    assert run.init.precision.precision == precision


def test_without_a_precision_section_the_run_is_fp32(tmp_path):
    start, end = NEWER.index("    precision:"), NEWER.index("    loop:")
    assert load_params(write(tmp_path, NEWER[:start] + NEWER[end:])).init.precision.precision == Precision(
        "fp32"
    )


def test_keys_without_effect_get_a_notice(tmp_path):
    text = NEWER.replace("log_loss_scale: true", "precision_opt_level: 1")
    text = text.replace("- ComputeNorm: {}", "- ScopedTrainFlags: {csx.performance.micro_batch_size: 8}")
    path = write(tmp_path, text.replace("num_csx: 2", "num_csx: 2, max_wgt_servers: 1"))
    assert keys_without_effect(path) == [
        "trainer.init.backend.cluster_config.max_wgt_servers",
        "trainer.init.precision.precision_opt_level",
        "trainer.init.callbacks[0].ScopedTrainFlags",
    ]


def test_notices_name_keys_of_the_older_form(tmp_path):
    path = write(tmp_path, OLDER + "  save_losses: true\n  precision_opt_level: 1\n")
    assert keys_without_effect(path) == ["runconfig.save_losses", "runconfig.precision_opt_level"]


def test_a_logger_without_effect_gets_a_notice(tmp_path):
    loggers = "    loggers:\n    - ProgressLogger: {}\n    callbacks:"
    path = write(tmp_path, NEWER.replace("    callbacks:", loggers))
    assert keys_without_effect(path) == ["trainer.init.loggers[0].ProgressLogger"]


def test_cbfloat16_and_its_loss_scale_get_a_notice(tmp_path):
    text = NEWER.replace("fp16_type: bfloat16", "fp16_type: cbfloat16\n      loss_scaling_factor: dynamic")
    assert keys_without_effect(write(tmp_path, text)) == [
        "trainer.init.precision.fp16_type",
        "trainer.init.precision.loss_scaling_factor",
    ]


def test_mixed_forms_are_refused(tmp_path):
    path = write(tmp_path, NEWER + "runconfig: {seed: 1}\n")
    with pytest.raises(ConfigError, match=r"mixes the older form \(runconfig\) with the newer one") as caught:
        load_params(path)
    assert caught.value.where == f"{path}, line {len(NEWER.splitlines()) + 1}: runconfig"


CEREBRAS_GPT = (
    "111m", "111m_mup", "256m", "256m_mup", "590m", "590m_mup", "1p3b", "1p3b_mup", "2p7b", "2p7b_mup",
    "6p7b", "13b_bs720", "13b_bs1080",
)  # fmt: skip


@pytest.mark.parametrize("size", CEREBRAS_GPT)
def test_public_cerebras_gpt_files_load_unchanged(size):
    folder = public_params("nlp", "gpt3", "configs", "Cerebras_GPT")
    run = load_params(folder / f"{size}.yaml")
    init = run.init
    assert init.precision.precision == Precision("bf16")
    assert init.schedule.value(0) == 0.0
    assert init.schedule.value(init.loop.max_steps) < init.schedule.value(2000)
    assert init.compute_norm
    assert run.fit is not None
    assert len(run.fit.train_dataloader.data_dir) == 10
    assert (init.model.mup_base_hidden_size == 256) == size.endswith("mup")
    assert keys_without_effect(run.source) == ["trainer.init.precision.precision_opt_level"]


def test_public_111m(tmp_path):
    run = load_params(public_params("nlp", "gpt3", "configs", "Cerebras_GPT") / "111m.yaml")
    model = run.init.model
    assert (model.hidden_size, model.num_hidden_layers, model.num_heads, model.ffn_size) == (
        768,
        10,
        12,
        3072,
    )
    assert (model.loss_scaling, model.loss_weight) == ("batch_size", 1 / 2048)
    assert run.init.schedule.value(1525) == pytest.approx(6e-4)
    assert run.init.schedule.value(9037) == pytest.approx(6e-5)


def test_every_public_gpt3_file_loads():
    folder = public_params("nlp", "gpt3", "configs")
    for file in sorted(folder.rglob("*.yaml")):
        assert load_params(file).init.model.name == "gpt3"


def test_public_file_in_the_older_form():
    config = load_params(public_params("vision", "fc_mnist", "configs") / "params.yaml")
    assert config.init.model.name == "fc_mnist"
    assert config.fit.train_dataloader.data_processor == "MNISTDataProcessor"
    assert config.init.optimizer_spec.kwargs["lr"] == 0.001
