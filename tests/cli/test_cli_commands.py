"""The commands beside fit and validate."""

import re
import shlex
import subprocess
import sys

import pytest
import torch
import yaml
from run_samples import history

from headwater.cli.main import COMMANDS
from headwater.config import load_params
from headwater.models.registry import build_model
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.pretrained import checkpoint_weights
from shared_data import SHARED


def shared(name):
    """A folder of public files, where this machine has it."""
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {name} here")
    return SHARED / name


@pytest.fixture
def trained(headwater, params, tmp_path):
    """The model_dir of a short run."""
    assert headwater("fit", params, "--max_steps", 2)[0] == 0
    return tmp_path / "run"


def test_every_command_has_help(capsys):
    from headwater.cli.main import main

    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([command, "--help"])
        assert exit_.value.code == 0
        assert "usage: headwater" in capsys.readouterr().out


def test_help_of_a_command_within_a_command_describes_it(capsys):
    from headwater.cli.main import main

    for words, text in (
        (("checkpoint", "import"), "Create a run from weights."),
        (("scaling", "write"), "Write the params files of a family."),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert text in capsys.readouterr().out


def test_help_names_values_by_their_type(capsys):
    from headwater.cli.main import main

    with pytest.raises(SystemExit):
        main(["data", "--help"])
    said = capsys.readouterr().out
    assert "--sequence_length N" in said and "--val_fraction X" in said and "VAL_FRACTION" not in said


def test_help_is_printed_without_a_command(headwater):
    code, out, _ = headwater()
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_plan_needs_no_data(headwater, tmp_path):
    drawing = tmp_path / "plan.png"
    code, out, _ = headwater("plan", "gpt/tiny", "--png", drawing, "--batch_size", 4)
    assert code == 0
    assert "blocks.0…3" in out and "Predicted peak" in out and "Predicted step" in out
    assert drawing.read_bytes().startswith(b"\x89PNG")


def test_plan_of_a_model_far_larger_than_the_machine(headwater, tmp_path):
    code, _, err = headwater("plan", "gpt/175b", "--batch_size", 1, "--host_memory", "8GiB")
    assert code == 2
    assert "does not fit" in err and "disk" in err


def test_plan_of_several_ranks(headwater, params):
    code, output, _ = headwater("plan", params, "--num_csx=2", "--num_memx=1")
    assert code == 0
    assert "2 CSXs × 1 × 4 samples" in output and "masters are updated by rank 2," in output
    code, _, error = headwater("plan", params, "--num_csx=2", "--batch_size=7")
    assert code == 2 and "write 6 or 8" in error
    code, output, error = headwater("plan", params, "--num_csx=512", "--batch_size=1024")
    assert code == 0 and "512 CSXs × 1 × 2 samples" in output
    assert "512 CSXs need several hosts" in error


def test_generate_continues_the_prompt(headwater, trained):
    words = ("generate", "--model_dir", trained, "--prompt", "Pip", "--max_new_tokens", 5)
    code, out, _ = headwater(*words, "--seed", 1)
    assert code == 0 and out.startswith("Pip") and len(out) > 4
    assert headwater(*words, "--seed", 1)[1] == out
    assert headwater(*words, "--seed", 2)[1] != out


def test_generate_prints_only_the_continuation_and_repeats_no_token(headwater, trained):
    words = ("generate", "--model_dir", trained, "--prompt", "Pip", "--max_new_tokens", 12, "--no-do_sample")
    full, alone = (headwater(*words, *more)[1] for more in ((), ("--no-return_full_text",)))
    assert full == f"Pip{alone}"
    code, out, _ = headwater(*words, "--no_repeat_ngram_size", 1)
    assert code == 0 and out != full
    assert headwater(*words, "--temperature", 0)[1] == full


def test_generate_searches_with_beams(headwater, trained):
    words = ("generate", "--model_dir", trained, "--prompt", "Pip", "--max_new_tokens", 8, "--num_beams", 3)
    code, out, _ = headwater(*words, "--early_stopping", "--no_repeat_ngram_size", 2)
    assert code == 0 and out.startswith("Pip")
    assert headwater(*words, "--early_stopping", "--no_repeat_ngram_size", 2, "--seed", 5)[1] == out
    code, _, err = headwater(*words[:-1], 0)
    assert code == 2 and "num_beams from 2 to 256, got 0" in err


def test_generate_refuses_what_does_not_fit(headwater, trained):
    words = ("generate", "--model_dir", trained, "--prompt", "Pip", "--max_new_tokens", 0)
    assert headwater(*words)[:2] == (0, "Pip\n")
    code, _, err = headwater("generate", "--model_dir", trained, "--prompt", "Pip", "--max_new_tokens", 99)
    assert code == 2 and "request at most" in err
    most = int(err.partition("request at most ")[2].split()[0])
    words = ("generate", "--model_dir", trained, "--prompt", "Pip", "--seed", 3)
    assert headwater(*words)[:2] == headwater(*words, "--max_new_tokens", most)[:2]
    code, _, err = headwater("generate", "--model_dir", trained, "--prompt", "Pip " * 50)
    assert code == 2 and "100 new tokens do not fit" in err


def test_checkpoint_info(headwater, trained):
    code, out, _ = headwater("checkpoint", "info", trained, "--verify")
    assert code == 0
    assert "checkpoint_2" in out and "AdamW" in out and "all checksums are correct" in out


def test_export_is_read_by_transformers_and_import_reads_it_back(headwater, params, trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    exported = tmp_path / "exported"
    assert headwater("checkpoint", "export", "--model_dir", trained, "--out", exported)[0] == 0
    code, out, _ = headwater("checkpoint", "diff", trained, exported)
    assert code == 0 and "the same, bit for bit" in out, "a model_dir stands for its newest checkpoint"
    assert f"comparing {complete_checkpoints(trained)[-1].name}" in out
    tokens = torch.arange(12).reshape(1, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = build_model(load_params(params).init.model).eval()
    ours.load_state_dict(dict(checkpoint_weights(trained / "checkpoint_2")), strict=False)
    torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)

    code, out, _ = headwater(
        "checkpoint", "import", exported, "--model_dir", tmp_path / "new", "--params", params
    )
    assert code == 0 and "checkpoint_0" in out
    weights = dict(checkpoint_weights(tmp_path / "new" / "checkpoint_0"))
    for name, value in checkpoint_weights(trained / "checkpoint_2"):
        assert torch.equal(value, weights[name]), name
    code, out, _ = headwater("fit", tmp_path / "new", "--max_steps", 1, "trainer.init.model.dropout_rate=0.0")
    assert code == 0 and "continuing from step 0" in out
    code, _, err = headwater("checkpoint", "import", exported, "--model_dir", tmp_path / "new")
    assert code == 2 and "already contains a run" in err
    other = tmp_path / "other"
    code, _, err = headwater("checkpoint", "import", exported, "--model_dir", other, "--params", "none.yaml")
    assert code == 2 and "none.yaml" in err and not other.exists()


def test_config_validates_a_file_and_lists_the_shipped_ones(headwater, params):
    assert headwater("config", "validate", params)[:2] == (0, f"{params} is valid\n")
    code, out, _ = headwater("config", "list")
    assert code == 0 and "gpt/tiny" in out.split()


def test_data_prepares_text_and_trains_a_tokenizer(headwater, tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 50)
    out = tmp_path / "out"
    words = ("--out", out, "--vocab_size", 300, "--sequence_length", 16, "--num_workers", 1)
    code, shown, _ = headwater("data", tmp_path / "text.txt", *words)
    assert code == 0 and "unigram entropy" in shown
    assert (out / "train").is_dir() and (out / "tokenizer.json").is_file()


@pytest.mark.pictures
def test_demo_trains_evaluates_and_explains_the_run(headwater, tmp_path):
    folder = tmp_path / "demo"
    code, out, _ = headwater("demo", "--max_steps", 2, "--model_dir", folder)
    assert code == 0
    losses = re.search(r"validation loss ([\d.]+) nats per token; .* has ([\d.]+)", out.replace("\n", " "))
    assert losses is not None and 0 < float(losses[2]) < float(losses[1]), "two steps teach nothing yet"
    for name in ("checkpoint_2", "loss_curve.png", "train"):
        assert (folder / name).exists() and str(folder / name) in out.replace("\n", "")
    assert [record["step"] for record in history(folder)] == [1, 2, 2]
    first = out.replace("\n", " ")
    assert "2.20 M parameters in 7 stages" in first and "for 2 steps" in first, (
        "the first screen explains the run"
    )
    assert f"generate --model_dir {folder}" in out, "the last lines say what to try next"
    streamed = re.search(r"streamed ([\d.]+) MiB/step", out)
    assert streamed is not None and float(streamed[1]) > 8.4, "the weights cross more than once a step"


def test_the_plan_that_the_demo_suggests_fits(headwater, tmp_path, monkeypatch):
    from headwater.cli.demo import _next_steps

    monkeypatch.chdir(tmp_path)
    (line,) = [line for line in _next_steps(tmp_path).splitlines() if " plan " in line and "#" not in line]
    code, out, err = headwater(*shlex.split(line)[1:])
    assert code == 0, err
    assert "disk" in out


def test_public_params_run_unchanged_but_for_the_data(headwater, data, tmp_path):
    params = shared("public_params") / "nlp/gpt3/configs/Cerebras_GPT/111m.yaml"
    small = ("hidden_size=32", "num_hidden_layers=2", "num_heads=2", "vocab_size=300", "filter_size=64")
    code, out, err = headwater(
        "fit",
        params,
        *(f"trainer.init.model.{setting}" for setting in small),
        f"trainer.fit.train_dataloader.data_dir={data}/train",
        f"trainer.fit.val_dataloader.data_dir={data}/val",
        f"trainer.validate.val_dataloader.data_dir={data}/val",
        f"trainer.validate_all.val_dataloaders.data_dir={data}/val",
        "trainer.fit.train_dataloader.num_workers=0",
        "trainer.fit.val_dataloader.num_workers=0",
        "trainer.fit.val_dataloader.batch_size=16",
        "--model_dir", tmp_path / "run", "--max_steps", 2, "--batch_size", 8, "--eval_steps", 1,
    )  # fmt: skip
    assert code == 0, err
    assert "bf16" in out
    assert "has no effect" in err, "keys that mean nothing here are named"
    assert [record["kind"] for record in history(tmp_path / "run")] == ["train", "train", "validate"]
    assert (
        yaml.safe_load((tmp_path / "run" / "params.yaml").read_text())["trainer"]["init"]["model"]["name"]
        == "gpt3"
    )


@pytest.mark.real_start
def test_python_m_headwater_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "headwater", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("headwater ")
