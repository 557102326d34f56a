"""`headwater config`: validate, show, convert and list params files."""

# ruff: noqa: E501  (tables of cases are read in rows)

import pytest
import torch

from headwater.cli.main import main
from headwater.config import load_params
from headwater.core.units import format_count

OLD = """\
train_input: {data_processor: GptHDF5DataProcessor, data_dir: d, batch_size: 8, use_worker_cache: true}
eval_input: {data_processor: GptHDF5DataProcessor, data_dir: d, batch_size: 8, use_worker_cache: true}
model: {hidden_size: 32, num_heads: 4, vocab_size: 64, mixed_precision: true, use_bfloat16: true}
optimizer: {optimizer_type: AdamW, learning_rate: 0.1, epsilon: 1e-6}
runconfig: {max_steps: 10, enable_distributed: false}
"""


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "gpt2" / "old.yaml"
    path.parent.mkdir()
    path.write_text(OLD)
    return path


def test_convert_writes_the_same_run_in_the_newest_form(old, tmp_path, capsys):
    new = tmp_path / "new.yaml"
    assert main(["config", "convert", str(old), "--out", str(new)]) == 0
    said = capsys.readouterr().err
    assert "enable_distributed has no effect" in said
    assert "the model is assumed to be gpt2" in said
    before, after = load_params(old), load_params(new)
    assert (before.init.schedule, before.init.precision) == (after.init.schedule, after.init.precision)
    assert before.init.model.hidden_size == after.init.model.hidden_size
    assert before.init.optimizer_spec == after.init.optimizer_spec
    assert after.notices == ()


def test_convert_does_not_overwrite(old, tmp_path, capsys):
    assert main(["config", "convert", str(old), "--out", str(old)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert old.read_text() == OLD


def test_show_tells_where_each_value_comes_from(old, capsys):
    assert main(["config", "show", str(old), "--max_steps", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"trainer.init.model.hidden_size: 32  # {old}:3" in lines
    assert "trainer.init.loop.max_steps: 7  # command line" in lines
    assert "trainer.init.seed: 0  # default" in lines


def test_list_prints_lines_that_contain_a_word(capsys):
    assert main(["config", "list", "cerebras_gpt_111m"]) == 0
    out = capsys.readouterr().out
    (line,) = [each for each in out.splitlines() if each.startswith("gpt/cerebras_gpt_111m ")]
    assert line.split() == [
        "gpt/cerebras_gpt_111m",
        "gpt3",
        "layers",
        "10,",
        "width",
        "768",
        "GptHDF5DataProcessor",
    ]


def test_list_counts_the_parameters_of_each_model(capsys):
    transformers = pytest.importorskip("transformers")
    assert main(["config", "list", "gpt2_small", "--sizes"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    count = sum(value.numel() for value in theirs.parameters())
    assert f"  {format_count(count)}  GptHDF5DataProcessor" in line


@pytest.mark.parametrize("form", ["fit", "validate"])
def test_data_dir_notice_names_loaders_that_it_does_not_set(form, tmp_path, capsys):
    assert main(["config", "validate", "gpt/tiny", "--data_dir", "mine"]) == 0
    said = capsys.readouterr().err
    assert "--data_dir only sets trainer.fit.train_dataloader" in said
    assert f"trainer.{form}.val_dataloader reads data/tiny/val" in said


def test_no_data_dir_notice_if_validation_data_are_given(capsys):
    loaders = [f"trainer.{section}.val_dataloader.data_dir=val" for section in ("fit", "validate")]
    assert main(["config", "validate", "gpt/tiny", "--data_dir", "mine", *loaders]) == 0
    assert capsys.readouterr().err == ""


def test_a_number_in_quotes(tmp_path, capsys):
    path = tmp_path / "params.yaml"
    path.write_text("extends: gpt/tiny\ntrainer: {init: {loop: {max_steps: '10'}}}\n")
    assert main(["config", "validate", str(path)]) == 2
    assert "write 10 without quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("trainer.init.model.num_heads=5", ["where: command line: trainer.init.model.num_heads", "change hidden_size or num_heads"]),
        ("trainer.init.backend.disk=scratch", ["write a mapping of keys: path, size"]),
        ("trainer.init.backend.host_memory=much", ["write for example 8GiB"]),
        ("trainer.init.lr=1", ["unknown key 'lr'"]),
        ("trainer.init.optimizer.AdamW.lr=1", ["unknown key 'lr'", "write 'learning_rate'"]),
        ("trainer.fit.train_dataloader.data_processor=GPTHDF5", ["write 'GptHDF5DataProcessor'"]),
    ],
)  # fmt: skip
def test_errors_say_what_to_write(change, words, capsys):
    assert main(["config", "validate", "gpt/tiny", change]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("validate", ["--eval_steps"], ["--job_priority", "--num_csx", "--num_memx"]),
        ("plan", ["--num_csx", "--num_memx"], ["--checkpoint_steps"]),
        ("lm_eval", ["--num_csx"], ["--num_memx", "--eval_steps"]),
        ("bigcode_eval", ["--host_memory"], ["--num_csx", "--num_memx", "--eval_steps"]),
    ],
)
def test_help_lists_only_options_that_the_command_uses(command, shown, hidden, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert all(option in said for option in shown)
    assert not [option for option in hidden if option in said]
