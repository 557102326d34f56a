"""Bad input of `headwater lm_eval` and `headwater evaluate`: what the message says, and its remedy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headwater.cli.main import main

TASK = {
    "task": "tiny_task",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
QUESTION = '{"question": "The mill grinds the", "choices": ["corn", "river"], "gold": 0}\n'


@pytest.fixture
def tiny_task(tmp_path):
    """Writes the file of a task with one question, with changes, and returns the options that name it."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (tmp_path / "questions.jsonl").write_text(QUESTION)

    def write(**changes):
        task = (
            TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}}} | changes
        )
        (folder / "tiny_task.yaml").write_text(yaml.safe_dump(task))
        return ["--tasks", "tiny_task", "--include_path", str(folder)]

    return write


@pytest.fixture
def message(capsys):
    """Runs a command that fails with exit code 2, and returns its message."""

    def run(*words):
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return run


@pytest.fixture(autouse=True)
def _installed(request):
    if "without_harness" not in request.fixturenames:
        pytest.importorskip("lm_eval")


@pytest.fixture
def without_harness(monkeypatch):
    monkeypatch.delitem(sys.modules, "headwater.evaluation.tasks", raising=False)
    monkeypatch.delitem(sys.modules, "headwater.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)


def test_lm_eval_is_not_installed(without_harness, message, library):
    error = message("lm_eval", library, "--tasks", "arc_easy")
    assert "lm-eval, which is not installed" in error
    assert "pip install 'headwater[eval]'" in error


def test_no_tasks(message, library):
    assert "add --tasks" in message("lm_eval", library)


def test_a_cache_of_several_ranks(message, library, tiny_task):
    error = message("lm_eval", library, *tiny_task(), "--num_csx=2", "--use_cache", "answers")
    assert "use_cache needs num_csx 1, got 2" in error
    assert "leave --use_cache out" in error


def test_more_ranks_than_cores(message, library, tiny_task):
    error = message("lm_eval", library, *tiny_task(), "--num_csx", "4096")
    assert "(cores of this machine), got 4096" in error


def test_programs_of_several_ranks(message, library, tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        '{"task_id": "a", "prompt": "def f():\\n", "test": "", "entry_point": "f"}\n'
    )
    options = ("--tasks", tmp_path / "mine.jsonl", "--num_csx", "2")
    assert "one rank writes the programs; got 2" in message("bigcode_eval", library, *options)


@pytest.fixture
def few_shipped_tasks(tmp_path, monkeypatch):
    """The harness ships the tasks of one of its folders only; the files of all take 12 s to read."""
    from lm_eval.tasks import manager

    folder = tmp_path / "shipped"
    shutil.copytree(Path(manager.__file__).parent / "hellaswag", folder / "hellaswag")
    monkeypatch.setattr(manager, "__file__", str(folder / "manager.py"))


def test_an_unknown_task_names_the_nearest(message, library, few_shipped_tasks):
    error = message("lm_eval", library, "--tasks", "hellaswagg")
    assert "unknown task 'hellaswagg'" in error
    assert "hellaswag" in error.replace("hellaswagg", "")


def test_the_data_of_a_task_are_not_there(message, library, tiny_task, tmp_path):
    options = tiny_task(dataset_kwargs={"data_files": {"test": str(tmp_path / "none.jsonl")}})
    error = message("lm_eval", library, *options)
    assert "tasks cannot be loaded" in error
    assert "none.jsonl" in error
    assert "--include_path" in error


def test_a_data_set_of_the_internet_without_internet(message, library, tiny_task):
    error = message("lm_eval", library, *tiny_task(dataset_path="nobody/nothing", dataset_kwargs={}))
    assert "tasks cannot be loaded" in error
    assert "nobody/nothing" in error


def test_a_missing_folder_of_tasks(message, library, tmp_path):
    error = message("lm_eval", library, "--tasks", "x", "--include_path", tmp_path / "none")
    assert "folder of task files does not exist" in error


def test_a_tokenizer_that_does_not_fit(message, library, tiny_task, tmp_path):
    from evaluation_samples import save_tokenizer

    words = [f"word{number}" for number in range(900)]
    save_tokenizer(tmp_path / "other", [" ".join(words * 3), "corn river" * 50], size=2000)
    error = message("lm_eval", library, "--tokenizer", tmp_path / "other", *tiny_task(doc_to_text="word899"))
    assert "tokenizer does not fit the model" in error
    assert "--tokenizer" in error


def test_a_missing_tokenizer(message, library, tiny_task, tmp_path):
    error = message("lm_eval", library, "--tokenizer", tmp_path / "none", *tiny_task())
    assert "tokenizer does not exist" in error


def test_a_prompt_longer_than_the_context(message, library, tiny_task, tmp_path, capsys):
    options = tiny_task(doc_to_text="The mill grinds the corn of the village. " * 20)
    error = message("lm_eval", library, *options)
    assert "does not fit" in error
    assert "96 positions" in error
    assert "--truncate" in error
    assert main(["lm_eval", str(library), *options, "--truncate"]) == 0
    assert "2 prompts of 2 shortened to the last 96 tokens" in capsys.readouterr().err


def test_more_new_tokens_than_positions(message, library, tiny_task):
    changes = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"]},
        "doc_to_target": "corn",
    }
    changes["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    error = message("lm_eval", library, *tiny_task(**changes))
    assert "256 new tokens does not fit" in error
    assert "--max_tokens" in error
    changes["generation_kwargs"] = {"max_gen_toks": 3, "num_beams": 4}
    error = message("lm_eval", library, *tiny_task(**changes))
    assert "generation does not know num_beams" in error


def test_a_folder_without_weights(message, library, tiny_task, tmp_path):
    shutil.copytree(library, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    error = message("lm_eval", tmp_path / "model", *tiny_task())
    assert "has no weights" in error
    assert "--checkpoint_path" in error


def test_a_run_without_checkpoint(message, trained, tiny_task, tmp_path):
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint_*"))
    error = message("lm_eval", tmp_path / "run", *tiny_task())
    assert "no checkpoint to evaluate" in error


def test_chat_without_a_template(message, library, tiny_task):
    error = message("lm_eval", library, *tiny_task(), "--apply_chat_template")
    assert "no chat template" in error


def test_options_are_checked(message, library, tiny_task):
    assert "got 'x'" in message("lm_eval", library, *tiny_task(), "--seed", "x")
    assert "--output_path" in message("lm_eval", library, *tiny_task(), "--log_samples")
    assert "the positions of the model" in message(
        "lm_eval", library, *tiny_task(), "--max_sequence_length", 97
    )


def test_git_is_asked_only_in_a_repository(library, tiny_task, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    words = ["lm_eval", str(library), *tiny_task(), "--output_path", str(tmp_path / "results.json")]

    def commit_in_results():
        assert main(words) == 0
        return json.loads((tmp_path / "results.json").read_text())["git_hash"]

    assert commit_in_results() is None
    assert "repository" not in capfd.readouterr().err
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    found = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=True)
    assert commit_in_results() == found.stdout.strip()
