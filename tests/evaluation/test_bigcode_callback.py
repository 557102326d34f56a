"""The callback `BigCodeEvalHarness`: programs during training."""

import json

import pytest
import yaml
from evaluation_samples import PARAMS, losses
from problem_samples import ADD, LAST, write_problems

from headwater.config.run import load_params
from headwater.core.errors import ConfigError
from headwater.trainer.task_callbacks import harness_callbacks


def test_programs_are_written_and_run_at_their_steps_and_do_not_change_the_training(run, tmp_path):
    path = write_problems(tmp_path / "tasks" / "own.jsonl", ADD, LAST).parent
    arguments = {
        "tasks": "own",
        "include_path": str(path),
        "n_samples": 2,
        "max_tokens": 6,
        "allow_code_execution": True,
    }
    section = {"bigcode_args": arguments, "every_n_vals": 2}
    evaluated = run("evaluated", [{"BigCodeEvalHarness": section}])
    files = sorted(file.name for file in (evaluated / "bigcode_0").iterdir())
    assert files == [
        f"{name}_{step}.json"
        for name in ("evaluation_results", "generations_own", "references_own")
        for step in (2, 4)
    ]
    results = json.loads((evaluated / "bigcode_0" / "evaluation_results_4.json").read_text())
    assert results["own"] == {"pass@1": 0.0}
    programs = json.loads((evaluated / "bigcode_0" / "generations_own_4.json").read_text())
    assert [len(each) for each in programs] == [2, 2]
    assert losses(evaluated) == losses(run("plain", []))


def test_a_model_that_has_learned_the_solutions_passes(run, tmp_path):
    path = write_problems(tmp_path / "tasks" / "own.jsonl", ADD, LAST).parent
    solutions = "\n".join(each["prompt"].strip() + "\n" + each["canonical_solution"] for each in (ADD, LAST))
    arguments = {
        "tasks": "own",
        "include_path": str(path),
        "n_samples": 10,
        "max_tokens": 20,
        "allow_code_execution": True,
    }
    section = {"BigCodeEvalHarness": {"bigcode_args": arguments}}
    trained = run("trained", [section], text=(solutions + "\n") * 60, max_steps=200, eval_frequency=200)
    results = json.loads((trained / "bigcode_0" / "evaluation_results_200.json").read_text())
    assert results["own"]["pass@1"] > 0.5, results["outcomes"]
    assert results["own"]["pass@10"] == 1.0


def params(tmp_path, section):
    """Write params with the callback and without data, and return their file."""
    tree = yaml.safe_load(PARAMS)
    tree["trainer"]["init"]["callbacks"] = [{"BigCodeEvalHarness": section}]
    del tree["trainer"]["fit"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "params.yaml"


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"bigcode_args": {"n_samples": 1}}, "needs tasks"),
        ({"bigcode_args": {"tasks": "x", "generation_only": False}}, "needs allow_code_execution"),
        ({"bigcode_args": {"tasks": "x", "samples": 1}}, "n_samples"),
        (
            {"bigcode_args": {"tasks": "x", "check_references": True, "allow_code_execution": True}},
            "need no model",
        ),
    ],
)
def test_sections_are_checked(tmp_path, section, what):
    with pytest.raises(ConfigError, match=what):
        load_params(params(tmp_path, section))


def test_several_ranks_are_refused(tmp_path):
    path = params(tmp_path, {"bigcode_args": {"tasks": "x"}})
    with pytest.raises(ConfigError, match="BigCodeEvalHarness needs num_csx 1 and num_memx 0, got num_csx 2"):
        harness_callbacks(load_params(path, ["--num_csx=2"]))


def test_missing_problems_end_a_run_at_its_start(tmp_path):
    section = {"bigcode_args": {"tasks": "x", "include_path": str(tmp_path)}}
    (callback,) = harness_callbacks(load_params(params(tmp_path, section)))
    with pytest.raises(ConfigError, match=r"expected x\.jsonl"):
        callback.on_fit_start(None)


def test_the_public_model_zoo_s_section_is_read(tmp_path):
    section = {
        "bigcode_args": {
            "prefix": "",
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 0,
            "top_p": 0.9,
            "n_samples": 10,
            "seed": 1,
            "tasks": "mbpp",
            "instruction_tokens": None,
            "max_tokens": 256,
            "limit": 5,
            "limit_start": 0,
            "save_every_k_tasks": -1,
            "postprocess": True,
            "allow_code_execution": False,
            "generation_only": True,
            "load_data_path": "problems",
            "save_generations": True,
            "save_generations_path": "generations.json",
            "save_references": True,
            "save_references_path": "references.json",
            "prompt": "prompt",
            "check_references": False,
        },
        "keep_data_dir": False,
        "every_n_vals": 1,
        "flags": {"csx.performance.micro_batch_size": None},
        "name_scope": "code",
        "batch_size": 4,
        "data_dir": "bigcode_data",
        "max_sequence_length": 64,
        "tokenizer_file_path": "tokenizer.json",
        "eos_id": 2,
        "bos_token": "<s>",
        "num_workers": 0,
    }
    config = load_params(params(tmp_path, section))
    (found,) = config.init.bigcode_harnesses
    assert found.bigcode_args.names == ["mbpp"] and not found.bigcode_args.runs_programs
    assert found.name_scope == "code"
