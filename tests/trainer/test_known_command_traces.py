"""Commands of tests share the traces of equal dry runs, and of no others."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import transformers
from test_run_setup import tiny
from torch import nn

import known_command_traces
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.core.precision import Precision
from headwater.evaluation.scorer import largest_pass
from headwater.plan.division import divide
from headwater.plan.partition import find_stages
from headwater.plan.trace import trace_step
from headwater.trainer import planning
from headwater.trainer.zoo_job import zoo_trainable

MODEL = "trainer.init.model"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which dry runs share traces."""
    known_command_traces.share_traces(tmp_path / "traces", monkeypatch.setattr)
    return tmp_path / "traces"


def dry_run(*overrides, size=2, length=None, loss=None, **options):
    init = tiny(*overrides).init
    trainable = zoo_trainable(init, length)
    trainable = trainable if loss is None else dataclasses.replace(trainable, loss=loss)
    return planning.dry_runs(init, trainable, **options)(size)


def largest(generates):
    return functools.partial(largest_pass, generates=generates)


def made(folder):
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_runs_that_differ_only_in_the_plan_share_a_trace(folder):
    first = dry_run()
    second = dry_run("trainer.init.backend.num_slabs=3", "trainer.init.seed=5", "host_memory=4GiB")
    assert made(folder) == 1 and first == second
    init = tiny().init
    trainable = zoo_trainable(init)
    assert second == trace_step(trainable.model, trainable.example(2), init.precision.precision)


def divided():
    """Return the smallest stages of the model."""
    model = zoo_trainable(tiny().init).model
    return divide(model, find_stages(model, Precision()), most_bytes=1)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([f"{MODEL}.hidden_size=48"], {}),
        ([f"{MODEL}.dropout_rate=0.3"], {}),
        ([f"{MODEL}.nonlinearity=relu"], {}),
        ([MODEL + '.lora_params={"r": 2, "target_modules": ["c_attn"]}'], {}),
        (["trainer.init.backend.attention=torch"], {}),
        (["trainer.init.precision.enabled=true", "trainer.init.precision.fp16_type=bfloat16"], {}),
        ([], {"size": 3}),
        ([], {"length": 4}),
        ([], {"inference": True}),
        ([], {"inference": True, "loss": largest(False)}),
        ([], {"device": "cuda"}),
        ([], {"partition": divided()}),
    ],
)
def test_runs_that_differ_in_the_computation_share_nothing(folder, overrides, changes):
    dry_run()
    dry_run(*overrides, **changes)
    assert made(folder) == 2


def test_passes_of_inference_share_a_trace(folder):
    first, second = (dry_run(loss=largest(False), inference=True) for _ in range(2))
    assert made(folder) == 1 and first == second
    other = dry_run(loss=largest(True), inference=True)
    assert made(folder) == 2 and other != first


def test_library_models_share_passes_of_inference_but_no_training(folder, tmp_path):
    def trace(name, layers, **options):
        sizes = {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_positions": 16}
        more = {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["GPT2LMHeadModel"]}
        transformers.GPT2Config(n_layer=layers, **sizes, **more).save_pretrained(tmp_path / name)
        init = tiny().init
        init = init.model_copy(update={"model": HuggingFaceConfig(name="hf", hf=tmp_path / name)})
        return planning.dry_runs(init, zoo_trainable(init), **options)(2)

    first, second = (trace(name, 2, inference=True) for name in ("first", "second"))
    assert made(folder) == 1 and first == second
    assert trace("third", 3, inference=True) != first
    assert made(folder) == 2
    trace("first", 2)
    assert made(folder) == 2


def test_other_models_and_losses_share_nothing(folder):
    class Other(nn.Linear):
        """A user's model."""

    init = tiny().init
    ours = zoo_trainable(init)
    loss = dataclasses.replace(ours, loss=lambda model, batch: model(batch) * 2)
    assert planning.dry_runs(init, loss)(2).stages
    users = dataclasses.replace(ours, model=Other(4, 4))
    assert known_command_traces._key(init, users, {}) is None
    assert known_command_traces._key(SimpleNamespace(backend=init.backend), users, {}) is None
    assert made(folder) == 0
