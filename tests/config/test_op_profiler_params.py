"""A profile of steps in params files of both forms, and on the command line."""

import pytest

from headwater.cli.fit import with_profile
from headwater.config import load_params, shipped_params
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import ALONE
from headwater.trainer.op_profiler import make_op_profilers

OLDER = """
train_input: {data_processor: GptHDF5MapDataProcessor, data_dir: data, batch_size: 4}
model: {name: gpt2, vocab_size: 50, hidden_size: 32, num_hidden_layers: 2, num_heads: 2, filter_size: 64,
        max_position_embeddings: 8}
optimizer: {optimizer_type: AdamW, learning_rate: 0.1}
runconfig: {max_steps: 10, op_profiler_config: {start_step: 1, end_step: 3}}
"""


def steps(config):
    return [(entry.start_step, entry.end_step) for entry in config.init.profiles]


def test_op_profiler_config_of_the_older_form(tmp_path):
    (tmp_path / "params.yaml").write_text(OLDER)
    config = load_params(tmp_path / "params.yaml")
    assert steps(config) == [(1, 3)]
    assert not any("op_profiler_config" in notice for notice in config.notices)


def test_the_callback_of_the_newer_form():
    callbacks = "trainer.init.callbacks=[{OpProfiler: {start_step: 2, end_step: 2, operators: true}}]"
    config = load_params(shipped_params()["gpt/tiny"], [callbacks])
    assert steps(config) == [(2, 2)] and config.init.profiles[0].operators


@pytest.mark.parametrize(
    ("old", "new", "message", "key"),
    [
        ("start_step: 1", "start_step: 4", "at most end_step, got start_step 4 and end_step 3", ""),
        ("start_step: 1", "start_step: 0", "start_step", ".start_step"),
        ("end_step: 3", "last_step: 3", "last_step", ".last_step"),
        ("start_step: 1, ", "", "the key 'start_step' is missing", ".start_step"),
    ],
)
def test_a_wrong_range_is_an_error_with_the_key_as_it_was_written(tmp_path, old, new, message, key):
    (tmp_path / "params.yaml").write_text(OLDER.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        load_params(tmp_path / "params.yaml")
    where = str(caught.value.where)
    assert where.endswith(f"params.yaml, line 6: runconfig.op_profiler_config{key}")


@pytest.mark.parametrize("written", ["5:10", "'5:10'"])
def test_steps_written_as_on_the_command_line_are_an_error_that_names_the_keys(tmp_path, written):
    (tmp_path / "params.yaml").write_text(OLDER.replace("{start_step: 1, end_step: 3}", f"{written} "))
    with pytest.raises(
        ConfigError, match="expected op_profiler_config to be a mapping of keys, got '5:10'"
    ) as no:
        load_params(tmp_path / "params.yaml")
    assert "start_step" in str(no.value.remedy) and "end_step" in str(no.value.remedy)
    (tmp_path / "params.yaml").write_text(OLDER.replace("max_steps: 10", "max_steps: 1:30"))
    with pytest.raises(ConfigError, match="expected max_steps to be an integer, got '1:30'"):
        load_params(tmp_path / "params.yaml")


def test_the_option_of_the_command_line_replaces_the_profiles_of_the_params(tmp_path):
    (tmp_path / "params.yaml").write_text(OLDER)
    config = load_params(tmp_path / "params.yaml")
    assert with_profile(config, None) is config
    assert steps(with_profile(config, "5:10")) == [(5, 10)]
    assert steps(with_profile(config, "7")) == [(7, 7)]


@pytest.mark.parametrize("text", ["10:5", "0:3", "a:b", "5-10", ":5", "5:", "", "1:2:3"])
def test_text_that_is_not_a_range_of_steps(text):
    config = load_params(shipped_params()["gpt/tiny"])
    with pytest.raises(ConfigError, match="expected the first and the last step, such as 5:10"):
        with_profile(config, text)


@pytest.mark.parametrize("second", ["{start_step: 3, end_step: 5}", "{start_step: 1, end_step: 9}"])
def test_profiles_with_common_steps_are_refused(second):
    callbacks = (
        f"trainer.init.callbacks=[{{OpProfiler: {second}}}, {{OpProfiler: {{start_step: 2, end_step: 3}}}}]"
    )
    with pytest.raises(ConfigError, match="OpProfiler callbacks with different steps, got"):
        load_params(shipped_params()["gpt/tiny"], [callbacks])


def test_profiles_begin_in_the_order_of_their_steps(tmp_path):
    callbacks = (
        "trainer.init.callbacks=[{OpProfiler: {start_step: 4, end_step: 5}},"
        " {OpProfiler: {start_step: 2, end_step: 3}}]"
    )
    profiles = load_params(shipped_params()["gpt/tiny"], [callbacks]).init.profiles
    made = make_op_profilers(profiles, tmp_path, None, ALONE)
    assert [callback.folder.name for callback in made] == ["steps_2_to_3", "steps_4_to_5"]
