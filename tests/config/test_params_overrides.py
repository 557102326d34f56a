"""Values on the command line that replace those of a params file."""

# ruff: noqa: E501  (tables of cases are read in rows)

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from params_samples import NEWER, write

from headwater.config import load_params
from headwater.config.overrides import SHORT_NAMES
from headwater.core.errors import ConfigError


def test_dotted_keys_and_short_names(newer):
    run = load_params(
        newer,
        [
            "--trainer.init.model.hidden_size=64",
            "trainer.init.optimizer.AdamW.betas=[0.8, 0.9]",
            "--num_steps=3",
            "--model_dir=elsewhere",
            "--num_csx=4",
            "--seed=9",
            "--batch_size=2",
            "--checkpoint_path=c.mdl",
            "--device_memory=2GiB",
        ],
    )
    init = run.init
    assert (init.model.hidden_size, init.loop.num_steps, init.seed, init.backend.num_csx) == (64, 3, 9, 4)
    assert init.loop.max_steps is None  # that of the file gives way
    assert init.model_dir == Path("elsewhere")
    assert init.optimizer.arguments.kwargs()["betas"] == (0.8, 0.9)
    assert init.backend.device_memory == 2 << 30
    assert run.fit is not None
    assert run.validation is not None
    assert run.fit.train_dataloader.batch_size == 2
    assert [loader.batch_size for loader in run.fit.val_dataloader] == [4]
    assert run.fit.ckpt_path == run.validation.ckpt_path == Path("c.mdl")


def test_overrides_reach_into_lists(newer):
    path = "trainer.init.schedulers.0.SequentialLR.schedulers.1.CosineDecayLR.end_learning_rate"
    assert load_params(newer, {path: 0.0}).init.schedule.value(1000) == 0.0


def test_a_mapping_takes_values_as_they_are(newer):
    assert (
        load_params(newer, {"trainer.init.precision": {"enabled": False}}).init.precision.precision.name
        == "fp32"
    )


def test_overrides_in_the_older_form(older, newer):
    flags = ["--runconfig.max_steps=5", "--model.hidden_size=64", "--optimizer.weight_decay_rate=0.5"]
    run = load_params(older, [*flags, "--seed=3"])
    assert (run.init.loop.max_steps, run.init.model.hidden_size, run.init.seed) == (5, 64, 3)
    assert run.init.optimizer.arguments.weight_decay == 0.5
    with pytest.raises(ConfigError, match="of the older form"):
        load_params(newer, flags)


def test_both_spellings_of_num_csx_are_one_key(tmp_path):
    path = write(tmp_path, NEWER.replace("cluster_config: {num_csx: 2}", "num_csx: 3"))
    assert load_params(path).init.backend.num_csx == 3
    assert load_params(path, ["--trainer.init.backend.cluster_config.num_csx=5"]).init.backend.num_csx == 5


def test_checkpoint_path_is_set_only_in_existing_sections(tmp_path):
    path = write(tmp_path, NEWER[: NEWER.index("  validate:")])
    run = load_params(path, ["--checkpoint_path=c.mdl"])
    assert run.fit is not None
    assert run.fit.ckpt_path == Path("c.mdl")
    assert run.validation is None


@pytest.mark.parametrize(
    ("flag", "where", "what", "remedy"),
    [
        ("--num_stpes=3", "command line", "unknown flag 'num_stpes'", "write 'num_steps'"),
        ("--hidden_size=3", "command line", "unknown flag 'hidden_size'", "trainer.init"),
        ("--num_steps", "command line", "expected key=value, got", "--num_steps=VALUE"),
        ("--num_steps=many", "command line: num_steps", "expected num_steps to be an integer, got 'many'", "integer"),
        ("--trainer.init.loop.max_step=3", "command line: trainer.init.loop.max_step", "unknown key", "'max_steps'"),
        ("--trainer.init.schedulers.1.X=3", "params.yaml", "expected a position in a list of 1, got 1", "from 0 to 0"),
    ],
)  # fmt: skip
def test_bad_overrides(newer, flag, where, what, remedy):
    with pytest.raises(ConfigError) as caught:
        load_params(newer, [flag])
    assert what in caught.value.what
    assert where in (caught.value.where or "")
    assert remedy in (caught.value.remedy or "")


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(1, 10**9), rate=st.floats(1e-9, 1.0), seed=st.integers(0, 2**40))
def test_the_command_line_reads_scalars_as_yaml(newer, steps, rate, seed):
    path = "trainer.init.optimizer.AdamW.weight_decay"
    run = load_params(newer, [f"--max_steps={steps}", f"--{path}={rate!r}", f"--seed={seed}"])
    assert run.init.loop.max_steps == steps
    assert run.init.optimizer.arguments.weight_decay == rate
    assert run.init.seed == seed


def test_every_short_name_leads_to_a_key_that_exists(newer):
    values = {
        "model": "gpt3",
        "data_dir": "x",
        "lr": 0.5,
        "learning_rate": 0.5,
        "model_dir": "x",
        "compile_dir": "x",
        "target_device": "GPU",
        "eval_frequency": 10,
        "autoload_last_checkpoint": False,
        "disk": "x",
        "checkpoint_path": "x",
        "job_labels": "kind=try",
        "job_priority": "p1",
    }
    for name in SHORT_NAMES:
        assert load_params(newer, {name: values.get(name, 4096)}) != load_params(newer)


@pytest.mark.parametrize(
    ("flags", "measures"),
    [
        (["--max_steps=7"], (7, None, None)),
        (["--epochs=2"], (None, None, 2)),
        (["--num_steps=7", "--max_steps=9"], (9, 7, None)),
    ],
)
def test_lengths_of_the_command_line_replace_those_of_the_file(newer, flags, measures):
    loop = load_params(newer, flags).init.loop
    assert (loop.max_steps, loop.num_steps, loop.num_epochs) == measures


def test_a_learning_rate_scales_the_schedules(newer):
    before, after = (load_params(newer, flags).init.schedule for flags in ([], ["--lr=0.01"]))
    for step in (0, 5, 10, 50, 100):
        assert after.value(step) == pytest.approx(10 * before.value(step), rel=1e-12)
    assert load_params(newer, ["--learning_rate=0.01"]).init.schedule == after


def test_a_learning_rate_of_the_optimizer_is_replaced(newer):
    text = newer.read_text()
    start, end = text.index("    schedulers:"), text.index("    precision:")
    newer.write_text(text[:start].replace("weight_decay: 0.1", "learning_rate: 0.1") + text[end:])
    assert load_params(newer, ["--lr=0.5"]).init.schedule.value(3) == 0.5


@pytest.mark.parametrize("rate", ["fast", "0", "-1", "true", ".nan", ".inf"])
def test_other_learning_rates_are_refused(newer, rate):
    with pytest.raises(ConfigError, match="expected learning_rate to be a finite number > 0"):
        load_params(newer, [f"--lr={rate}"])


def test_data_of_the_command_line(newer):
    assert load_params(newer, ["--data_dir=elsewhere"]).fit.train_dataloader.data_dir == (Path("elsewhere"),)
