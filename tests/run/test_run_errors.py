"""Errors in a user's params, model or data: one message, and no data are lost."""

import pytest
import torch
import yaml
from own_models import (
    PARAMS,
    Classifier,
    clusters,
    get_eval_dataloader,
    get_train_dataloader,
    history,
    write_params,
)
from torch import nn

import headwater
from headwater.config.user import load_user_params
from headwater.core.errors import ConfigError, DataError
from headwater.run import PyTorchBaseModel, run
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.user_data import Passes, RepeatedPasses


@pytest.fixture
def refused(tmp_path, capsys):
    """Run, check that the exit code is 2, and return the error output."""

    def call(*words, text=PARAMS, model=Classifier, data=get_train_dataloader, evaluation=None):
        params = write_params(tmp_path, text=text)
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            run(model, data, evaluation, argv=["--params", str(params), "--mode", "train", *words])
        err = capsys.readouterr().err
        assert error.value.code == 2 and "Traceback" not in err
        return err

    return call


def without(section):
    keys = yaml.safe_load(PARAMS)
    del keys[section]
    return yaml.safe_dump({name: keys[name] for name in sorted(keys, key="runconfig".__eq__)})


# params


def test_user_params_with_values_of_the_command_line(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS.replace("seed: 5", "seed: 5\n  checkpoint_path: somewhere"))
    options = {"num_steps": 9, "batch_size": 16, "model.widths": [1], "checkpoint_steps": 0}
    config = load_user_params(path, {**options, "trainer.init.backend.num_slabs": 2})
    assert (config.init.loop.num_steps, config.init.backend.num_slabs, config.init.checkpoint.steps) == (
        9,
        2,
        0,
    )
    assert config.params["runconfig"]["num_steps"] == 9
    assert config.params["train_input"] == {"num_examples": 64, "batch_size": 16, "shuffle": True}
    assert config.params["model"] == {"widths": [1], "dropout": 0.1}
    assert str(config.checkpoint) == "somewhere"


@pytest.mark.parametrize("section", ["model", "train_input", "eval_input"])
def test_sections_for_the_users_functions_are_optional(tmp_path, section):
    path = write_params(tmp_path, text=without(section))
    assert load_user_params(path).params[section] == {}


@pytest.mark.parametrize("section", ["optimizer", "runconfig"])
def test_missing_required_sections_are_errors(tmp_path, section):
    path = tmp_path / "params.yaml"
    path.write_text(without(section))
    with pytest.raises(ConfigError, match=f"section '{section}' is missing"):
        load_user_params(path)


def test_params_may_extend_others(tmp_path):
    base = write_params(tmp_path, "base")
    path = tmp_path / "params.yaml"
    path.write_text(f"extends: {base}\nmodel: {{widths: [3]}}\nrunconfig: {{max_steps: 2}}\n")
    config = load_user_params(path)
    assert config.params["model"] == {"widths": [3], "dropout": 0.1}
    assert (config.init.loop.max_steps, config.init.seed) == (2, 5)


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        ("max_steps", "max_stesp", ["unknown key 'max_stesp'", "write 'max_steps'", "line "]),
        ("weight_decay", "weight_deacy", ["weight_deacy"]),
        ("max_steps: 6", "max_steps: many", ["expected max_steps to be an integer"]),
        ("optimizer:", "optimiser:", ["section 'optimizer' is missing"]),
        ("eval_input:", "evaluation:", ["unknown key 'evaluation'"]),
        ("model:\n  widths: [24, 24, 24]\n  dropout: 0.1", "model: 3", ["expected a mapping", "model"]),
    ],
)
def test_params_that_are_wrong(refused, old, new, texts):
    err = refused(text=PARAMS.replace(old, new))
    assert all(text in err for text in texts), err


def test_params_in_the_newer_form(refused):
    assert "older form" in refused(text="trainer:\n  init: {}\nrunconfig:\n")


def test_options_that_are_wrong(refused):
    assert "did you mean --num_steps?" in refused("--num_stpes", "3")
    assert "needs evaluation data" in refused("--mode", "eval")
    assert "not allowed with" in refused("--compile_only", "--validate_only")


# models


class Plain(nn.Module):
    def __init__(self, params):
        super().__init__()


class Hollow(PyTorchBaseModel):
    def __init__(self, params, device=None):
        self.net = nn.Linear(12, 4)

    def __call__(self, data):
        return self.net(data[0]).mean()


class NoLoss(PyTorchBaseModel):
    pass


class LearnedLoss(Classifier):
    def __init__(self, params, device=None):
        super().__init__(params)
        self.temperature = nn.Linear(1, 1)


class ManyLosses(Classifier):
    def __call__(self, data):
        return self.model(data[0])


class NumberLoss(Classifier):
    def __call__(self, data):
        return super().__call__(data).item()


class DetachedLoss(Classifier):
    def __call__(self, data):
        return super().__call__(data).detach()


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (Plain, ["Plain is not a subclass of PyTorchBaseModel"]),
        (lambda params: None, ["is not a subclass of PyTorchBaseModel"]),
        (Hollow, ["Hollow.__init__ has not set the model", "super().__init__(params=params"]),
        (NoLoss, ["NoLoss has no loss", "__call__(self, data)"]),
        (LearnedLoss, ["LearnedLoss.temperature has parameters that are not in the model"]),
        (ManyLosses, ["the loss of ManyLosses has shape [8, 4]", "mean()"]),
        (NumberLoss, ["the loss of NumberLoss is a float"]),
        (DetachedLoss, ["the loss of DetachedLoss depends on no parameter"]),
    ],
)
def test_models_that_cannot_be_trained(refused, model, texts):
    err = refused(model=model)
    assert all(text in err for text in texts), err


def test_an_exception_in_the_users_model_is_not_wrapped(tmp_path):
    class Broken(Classifier):
        steps = 0

        def __call__(self, data):
            loss = super().__call__(data)
            Broken.steps += 1
            if Broken.steps == 6:  # the dry run, and five steps
                raise ZeroDivisionError("mine")
            return loss

    params = write_params(tmp_path)
    words = ["--params", str(params), "--mode", "train"]
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(Broken, get_train_dataloader, argv=words)
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint_3"]
    run(Classifier, get_train_dataloader, argv=words)
    assert [r["step"] for r in history(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


# data


def batches(count=3):
    return [clusters(8, seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (lambda params: None, ["to return an iterable of batches, got None", "DataLoader"]),
        (lambda params: [], ["the loader has no batch"]),
        (lambda params: iter(batches()), ["has no batch in pass 2", "a generator cannot"]),
        (lambda params: [{"text": "words"}], ["expected a batch with a tensor", "got a dict without one"]),
        (lambda params: [torch.tensor(1.0)], ["expected a batch with a tensor"]),
    ],
)
def test_loaders_that_give_nothing_to_train_on(refused, data, texts):
    err = refused(data=data)
    assert all(text in err for text in texts), err


def test_a_batch_that_is_not_full_cannot_be_divided(refused):
    ragged = [*batches(), clusters(7, 9)]
    err = refused("--micro_batch_size", "4", data=lambda params: ragged)
    assert "7 samples cannot be divided into 2 equal micro-batches" in err


def test_max_restarts_is_refused_outside_fit(refused):
    assert "only `headwater fit` restarts a run" in refused("--max_restarts", "2")
    with pytest.raises(ConfigError, match=r"(?s)only `headwater fit`.*cluster_config\.max_restarts"):
        headwater.backend("CSX", cluster_config={"max_restarts": 1})


def test_a_checkpoint_of_other_data(refused, tmp_path):
    words = ["--params", str(write_params(tmp_path)), "--mode", "train", "--num_steps", "3"]
    run(Classifier, get_train_dataloader, argv=words)
    assert "a pass had 8 batches, now it has 4" in refused("--batch_size", "16")


def test_an_iterable_that_has_become_shorter():
    class Endless:
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter(batches(self.count))

    long = RepeatedPasses(Passes(Endless(4), 0, "data"))
    for _ in zip(range(3), long, strict=False):
        pass
    short = RepeatedPasses(Passes(Endless(2), 0, "data"))
    short.load_state_dict(long.state_dict())
    with pytest.raises(DataError, match="a pass has fewer than 3 batches"):
        next(iter(short))


def test_epochs_of_unknown_length(refused):
    text = PARAMS.replace("max_steps: 6", "num_epochs: 2")
    err = refused(text=text, data=lambda params: iter(batches()))
    assert "num_epochs needs training data of known length" in err


def test_nothing_to_evaluate(tmp_path, capsys):
    words = ["--params", str(write_params(tmp_path)), "--mode", "eval"]
    with pytest.raises(SystemExit):
        run(Classifier, get_train_dataloader, get_eval_dataloader, argv=words)
    assert "there is no checkpoint to evaluate" in capsys.readouterr().err


class ComplexBuffer(Classifier):
    def __init__(self, params, device=None):
        super().__init__(params, device)
        self.model.register_buffer("frequencies", torch.ones(3, dtype=torch.complex128))


def test_a_buffer_that_no_checkpoint_can_hold_is_refused_before_training(refused, tmp_path):
    err = refused(model=ComplexBuffer)
    assert "torch.complex128, which no checkpoint can hold" in err
    assert "frequencies" in err and "persistent=False" in err
