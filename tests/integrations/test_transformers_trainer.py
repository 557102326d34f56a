"""`StreamedTrainer` equals the Trainer of transformers: logs, weights, predictions, checkpoints."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from places import assert_same_tensors, backend, bytes_in_files, every_plan
from safetensors.torch import load_file
from trainers import VALIDATION, gpt2, history, trainer_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import headwater
from headwater.api.compile import streamed
from headwater.core.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW if NEW in TrainingArguments.__dataclass_fields__ else OLD
"""The argument's name, which depends on the version of transformers."""


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
    )
    return LlamaForCausalLM(config)


def trained(*args, **options):
    """Return a Trainer after training; it seeds all randomness when it is built."""
    trainer = trainer_of(*args, **options)
    trainer.train()
    return trainer


def assert_same_run(one, other):
    assert history(one) == history(other)
    assert_same_tensors(one.model.state_dict(), other.model.state_dict())


@every_plan
def test_run_with_evaluation_accumulation_and_clipping_equals_plain_trainer(plan, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 9, "gradient_accumulation_steps": 2, "max_steps": 24}
    plain = trained(None, tmp_path / "plain", **options)
    ours = trained(backend(plan, tmp_path), tmp_path / "ours", **options)
    assert_same_run(ours, plain)
    assert ["eval_loss" in entry for entry in history(ours)].count(True) == 3
    assert ours.state.log_history[5]["grad_norm"] > 1.0  # the gradient was clipped
    assert (ours.predict(VALIDATION).predictions == plain.predict(VALIDATION).predictions).all()


@pytest.mark.parametrize("options", [{"optim": "adafactor"}, {"max_grad_norm": 0.0}])
def test_llama_with_other_settings_equals_plain_trainer(options, tmp_path):
    plain = trained(None, tmp_path / "plain", llama(), **options)
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", llama(), **options)
    assert_same_run(ours, plain)


def test_evaluation_before_training_equals_plain_trainer(tmp_path):
    trainers, losses = [], []
    for place in (None, backend("slabs", tmp_path)):
        trainer = trainer_of(place, tmp_path / "run")
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        trainers.append(trainer)
    assert losses[0] == losses[1]
    assert_same_run(*trainers)


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_each_trainer_resumes_the_other_s_checkpoints(plan, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4}
    plain = trained(None, tmp_path / "plain", **saving)
    ours = trained(backend(plan, tmp_path), tmp_path / "ours", **saving)
    assert_same_run(ours, plain)

    def resumed(place, folder):
        trainer = trainer_of(place, tmp_path / "resumed", **saving)
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-4"))
        return trainer

    for folder in ("ours", "plain"):
        assert_same_run(resumed(backend(plan, tmp_path), folder), plain)
    assert_same_run(resumed(None, "ours"), plain)


def test_checkpoints_are_equal(tmp_path):
    folders = [tmp_path / "plain", tmp_path / "ours"]
    for place, folder in zip((None, backend("slabs", tmp_path)), folders, strict=True):
        trained(place, folder, max_steps=2, save_strategy="steps", save_steps=2)
    plain, ours = ({path.name: path for path in folder.glob("checkpoint-2/*")} for folder in folders)
    assert plain.keys() == ours.keys() and "optimizer.pt" in ours
    assert_same_tensors(load_file(ours["model.safetensors"]), load_file(plain["model.safetensors"]))
    for name in ("config.json", "trainer_state.json", "scheduler.pt"):
        assert ours[name].read_bytes() == plain[name].read_bytes()


def test_saved_model_loads_in_transformers(tmp_path):
    trainer = trained(backend("disk", tmp_path), tmp_path / "ours", max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same_tensors(loaded.state_dict(), trainer.model.state_dict())


def test_optimizer_state_is_written_without_being_whole_in_memory(tmp_path):
    config = GPT2Config(vocab_size=256, n_positions=24, n_embd=256, n_layer=2, n_head=2)
    trainer = trained(backend("disk", tmp_path), tmp_path, GPT2LMHeadModel(config), max_steps=1)
    with bytes_in_files() as sizes:
        trainer._save_checkpoint(trainer.model, trial=None)
    assert sizes.count(256 * 1024 * 4) >= 8  # two moments of two matrices in each of two blocks


def test_resuming_with_another_model_is_refused(tmp_path):
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trained(backend("slabs", tmp_path), tmp_path / "ours", **saving)
    other = trainer_of(backend("slabs", tmp_path), tmp_path / "ours", llama(), **saving)
    with pytest.raises(CheckpointError, match="model has no transformer"):
        other.train(resume_from_checkpoint=True)


def test_best_model_is_loaded_and_training_continues(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "best", "max_steps": 15}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    trainers = []
    for place, folder in ((None, "plain"), (backend("slabs", tmp_path), "ours")):
        trainer = trained(place, tmp_path / folder, **options)
        assert trainer.state.best_global_step == 5
        trainer.args.max_steps = 5
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)


def test_model_made_by_model_init_is_streamed(tmp_path):
    plain = trained(None, tmp_path / "plain", {"model_init": gpt2})
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", {"model_init": gpt2})
    assert streamed(ours.model).engine is not None
    assert_same_run(ours, plain)


def test_peft_adapters_equal_plain(tmp_path):
    def adapted():
        config = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        return get_peft_model(gpt2(), config)

    saving = {"save_strategy": "steps", "save_steps": 4}
    plain = trained(None, tmp_path / "plain", adapted(), **saving)
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", adapted(), **saving)
    assert_same_run(ours, plain)
    file = "checkpoint-4/adapter_model.safetensors"
    assert_same_tensors(load_file(tmp_path / "ours" / file), load_file(tmp_path / "plain" / file))
    resumed = trainer_of(backend("slabs", tmp_path), tmp_path / "ours", adapted(), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert_same_run(resumed, plain)


@pytest.mark.parametrize("model", [gpt2, llama])
def test_mixed_precision_equals_plain_trainer(model, tmp_path):
    options = {"max_steps": 20, "eval_strategy": "steps", "eval_steps": 5, "bf16": True}
    plain = trained(None, tmp_path / "plain", model(), **options)
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", model(), **options)
    assert streamed(ours.model).engine.plan.precision.name == "bf16"
    assert_same_run(ours, plain)


def test_fp16_on_a_cpu_computes_in_fp32_as_the_plain_trainer_does(tmp_path):
    plain = trained(None, tmp_path / "plain", fp16=True)
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", fp16=True)
    assert streamed(ours.model).engine.plan.precision.name == "fp32"
    assert_same_run(ours, plain)


def test_a_model_built_in_files_resumes(tmp_path):
    place = backend("disk", tmp_path)
    gpt2().save_pretrained(tmp_path / "initial")

    def built():
        with place.device:
            model = gpt2()
        headwater.load_pretrained(model, tmp_path / "initial")
        return model

    saving = {"save_strategy": "steps", "save_steps": 4}
    plain = trained(None, tmp_path / "plain", **saving)
    assert_same_run(trained(place, tmp_path / "ours", built(), **saving), plain)
    resumed = trainer_of(place, tmp_path / "ours", built(), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert_same_run(resumed, plain)


def test_an_empty_model_trains_and_refuses_to_resume(tmp_path):
    gpt2().save_pretrained(tmp_path / "initial")

    def empty():
        with headwater.empty_parameters():
            model = gpt2()
        headwater.load_pretrained(model, tmp_path / "initial")
        return model

    saving = {"save_strategy": "steps", "save_steps": 4}
    ours = trained(backend("disk", tmp_path), tmp_path / "ours", empty(), **saving)
    assert_same_run(ours, trained(None, tmp_path / "plain", **saving))
    resumed = trainer_of(backend("disk", tmp_path), tmp_path / "ours", empty(), **saving)
    with pytest.raises(CheckpointError, match=r"build the model within backend\.device"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))


@pytest.mark.parametrize(
    "options",
    [{CHECKPOINTING: True}, {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}],
)
def test_features_of_the_trainer_equal_plain_trainer(options, tmp_path):
    plain = trained(None, tmp_path / "plain", max_steps=5, **options)
    ours = trained(backend("slabs", tmp_path), tmp_path / "ours", max_steps=5, **options)
    assert_same_run(ours, plain)


def test_the_trainer_of_transformers_streams_a_compiled_model(tmp_path):
    plain = trained(None, tmp_path / "plain")
    model = headwater.compile(gpt2(), backend("slabs", tmp_path))
    compiled = trained(None, tmp_path / "ours", model)
    assert_same_run(compiled, plain)


def test_the_plain_backend_is_the_trainer_of_transformers(tmp_path):
    plain = trained(None, tmp_path / "plain", max_steps=3)
    ours = trained(headwater.backend("CPU"), tmp_path / "ours", max_steps=3)
    assert streamed(ours.model) is None
    assert_same_run(ours, plain)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"bf16_full_eval": True}, "set bf16=True"), ({"torch_compile": True}, r"backend\(compile=True\)")],
)
def test_unsupported_arguments_are_refused(options, remedy, tmp_path):
    with pytest.raises(ConfigError, match=remedy):
        trainer_of(backend("slabs", tmp_path), tmp_path, **options)
