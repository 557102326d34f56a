"""The callback `EleutherEvalHarness`: evaluations on tasks during training."""

import json

import pytest
import yaml
from evaluation_samples import PARAMS, losses

from headwater.cli.main import main
from headwater.config.run import load_params
from headwater.core.errors import ConfigError, RunError
from headwater.trainer.callback import Callback
from headwater.trainer.task_callbacks import harness_callbacks, report_scores


def test_evaluations_run_at_their_steps_and_do_not_change_the_training(run, tasks):
    pytest.importorskip("lm_eval")
    arguments = {
        "tasks": "local_arc_easy,local_triviaqa",
        "include_path": str(tasks),
        "limit": 4,
        "truncate": True,
    }
    section = {"eeh_args": arguments, "every_n_vals": 2}
    evaluated = run("evaluated", [{"EleutherEvalHarness": section}])
    files = sorted(path.name for path in (evaluated / "eleuther_0").iterdir())
    assert files == ["results_2.json", "results_4.json"]
    assert losses(evaluated) == losses(run("plain", []))

    out = evaluated / "own.json"
    words = ["lm_eval", str(evaluated), "--output_path", str(out), "--limit", "4"]
    assert main(words) == 0
    last = json.loads((evaluated / "eleuther_0" / "results_4.json").read_text())
    found = json.loads(out.read_text())["results"]
    for task, values in last["results"].items():
        for name, value in values.items():
            assert found[task][name] == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"eeh_args": {"num_fewshot": 1}}, "needs tasks"),
        ({"eeh_args": {"tasks": "x", "seed": "1,2"}}, "expected seed"),
        ({"eeh_args": {"tasks": "x", "trust_remote_code": True}}, "trust_remote_code"),
        ({"eeh_args": {"tasks": "x", "few_shot": 1}}, "num_fewshot"),
    ],
)
def test_sections_are_checked(tmp_path, section, what):
    tree = yaml.safe_load(PARAMS)
    tree["trainer"]["init"]["callbacks"] = [{"EleutherEvalHarness": section}]
    del tree["trainer"]["fit"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=what):
        load_params(tmp_path / "params.yaml")


def test_several_ranks_are_refused(tmp_path):
    tree = yaml.safe_load(PARAMS)
    tree["trainer"]["init"]["callbacks"] = [{"EleutherEvalHarness": {"eeh_args": {"tasks": "x"}}}]
    del tree["trainer"]["fit"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="needs num_csx 1 and num_memx 0, got num_csx 2"):
        harness_callbacks(load_params(tmp_path / "params.yaml", ["--num_csx=2"]))


def test_the_public_model_zoo_s_section_is_read(tmp_path):
    tree = yaml.safe_load(PARAMS)
    section = {
        "eeh_args": {"tasks": "winogrande", "num_fewshot": 0},
        "keep_data_dir": False,
        "batch_size": 4,
        "shuffle": False,
        "max_sequence_length": 64,
        "num_workers": 1,
        "data_dir": "pretraining_tutorial/eeh",
        "eos_id": 128001,
        "pretrained_model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "flags": {"csx.performance.micro_batch_size": None},
    }
    tree["trainer"]["init"]["callbacks"] = [{"EleutherEvalHarness": section}]
    del tree["trainer"]["fit"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(tree))
    config = load_params(tmp_path / "params.yaml")
    assert config.init.eleuther_harnesses[0].eeh_args.names == ["winogrande"]
    assert any("data_dir" in notice for notice in config.notices)


def test_all_callbacks_get_the_scores_if_one_of_them_fails():
    found = []

    class Noted(Callback):
        def on_scores(self, step, scores):
            found.append((step, scores))
            if len(found) == 1:
                raise RunError("no connection")

    with pytest.raises(RunError, match="no connection"):
        report_scores([Noted(), Noted()], 3, {"task/acc": 0.5})
    assert found == [(3, {"task/acc": 0.5})] * 2
