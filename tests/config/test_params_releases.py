"""Params files of older public releases: names of models, keys that are gone, and what they meant."""

from pathlib import Path

import pytest
from params_samples import public_params, write

from headwater.config import load_params
from headwater.config.releases.folders import model_of_folders
from headwater.core.errors import ConfigError
from headwater.core.precision import Precision
from headwater.optim import Linear, Sequential

GPT = """\
train_input:
  data_processor: GptHDF5DataProcessor
  data_dir: data/train
  max_sequence_length: 16
  batch_size: 8
  repeat: true
model:
  vocab_size: 64
  hidden_size: 32
  num_hidden_layers: 2
  num_heads: 4
  max_position_embeddings: 16
  use_position_embedding: true
  mixed_precision: true
  use_bfloat16: true
optimizer:
  optimizer_type: adamw
  learning_rate: 0.001
  epsilon: 1e-6
  weight_decay_rate: 0.1
  use_bias_correction: true
  loss_scaling_factor: dynamic
  disable_lr_steps_reset: true
runconfig:
  max_steps: 100
  keep_checkpoint_max: 3
  save_summary_steps: 10
  show_debug_metrics: false
  enable_distributed: false
  use_cs_grad_accum: true
  use_appliance_data: true
"""


def older(tmp_path, text=GPT, folder="gpt2/configs"):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    return write(tmp_path / folder, text)


def changed(old, new, text=GPT):
    assert old in text
    return text.replace(old, new)


def test_keys_of_older_releases_keep_their_meaning(tmp_path):
    run = load_params(older(tmp_path))
    assert (run.init.model.name, run.init.model.position_embedding_type) == ("gpt2", "learned")
    assert run.init.optimizer_spec.kwargs["eps"] == 1e-6
    assert run.init.optimizer_spec.kwargs["weight_decay"] == 0.1
    assert run.init.precision.precision == Precision("bf16")
    assert run.init.keep_checkpoints == 3


def test_a_notice_for_each_key_that_has_no_effect(tmp_path):
    path = older(tmp_path)
    notices = load_params(path).notices
    lines = path.read_text().splitlines()
    for key in (
        "max_sequence_length", "repeat", "disable_lr_steps_reset", "save_summary_steps", "show_debug_metrics",
        "enable_distributed", "use_cs_grad_accum", "use_appliance_data",
    ):  # fmt: skip
        line = next(index for index, text in enumerate(lines, 1) if text.strip().startswith(f"{key}:"))
        assert [each for each in notices if f", line {line}: " in each and f".{key} has no effect: " in each]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("transformers/pytorch/gpt3/configs/Cerebras_GPT", "gpt3"),
        ("bert/fine_tuning/classifier/configs", "bert/classifier"),
        ("nlp/bert/token_classifier/configs", "bert/token_classifier"),
        ("vision/pytorch/unet", "unet"),
        ("esm2/classification/configs", "esm2/classifier"),
    ],
)
def test_the_folder_names_the_model(folder, name):
    assert model_of_folders(Path("/zoo", folder, "params.yaml"))[0] == name


def test_a_notice_names_the_model_taken_from_the_folder(tmp_path):
    path = older(tmp_path)
    expected = f"{path}: the model is assumed to be gpt2, from the folder gpt2; --model NAME sets another"
    assert expected in load_params(path).notices


@pytest.mark.parametrize("folder", ["params", "gpt2/bert/configs"])
def test_a_missing_model_name_is_an_error(tmp_path, folder):
    path = older(tmp_path, folder=folder)
    with pytest.raises(ConfigError, match="the key 'name' of the model is missing") as raised:
        load_params(path)
    assert "--model" in raised.value.remedy
    assert load_params(path, ["--model=gpt3"]).init.model.name == "gpt3"


def test_the_model_name_of_the_command_line_replaces_the_folders(tmp_path):
    assert load_params(older(tmp_path), ["--model=gpt3"]).init.model.name == "gpt3"


def test_the_model_name_of_the_file_replaces_the_folders(tmp_path):
    run = load_params(older(tmp_path, changed("model:\n", "model:\n  name: gpt3\n")))
    assert run.init.model.name == "gpt3"
    assert not any("taken to be" in notice for notice in run.notices)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  use_appliance_data: true", "  use_appliance_dta: true", ["unknown key", "use_appliance_dta"]),
        ("repeat: true", "repeat: false", ["expected repeat: true, found false"]),
        (
            "epsilon: 1e-6",
            "epsilon: 1e-6\n  eps: 1e-5",
            ["optimizer.epsilon and optimizer.eps have the same meaning, but different values"],
        ),
        ("use_bfloat16: true", "use_bfloat16: 3", ["expected use_bfloat16: true or false, found 3"]),
        ("use_bfloat16: true", "use_bfloat16: [1]", ["use_bfloat16", "found [1]"]),
    ],
)
def test_unsupported_values_of_older_keys_are_errors(tmp_path, old, new, words):
    with pytest.raises(ConfigError) as raised:
        load_params(older(tmp_path, changed(old, new)))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_half_precision_was_float16_without_bfloat16(tmp_path):
    run = load_params(older(tmp_path, changed("use_bfloat16: true", "use_bfloat16: false")))
    assert run.init.precision.precision == Precision("fp16", "dynamic")


def test_adjust_learning_rate_wraps_schedules_of_the_older_form(tmp_path):
    ramp = "{scheduler: Linear, initial_learning_rate: 0.0, end_learning_rate: 0.1, steps: 10}"
    decay = "{scheduler: Linear, initial_learning_rate: 0.1, end_learning_rate: 0.0, alpha: 0.1, steps: 90}"
    text = changed(
        "learning_rate: 0.001",
        f"learning_rate: [{ramp}, {decay}]\n  adjust_learning_rate: {{decoder_kernel: 0.1}}",
    )
    run = load_params(older(tmp_path, text))
    assert run.init.schedule == Sequential((Linear(0.0, 0.1, 10), Linear(0.1, 0.0, 90)), (10,))
    assert run.init.optimizer.arguments.adjust_learning_rate == {"decoder_kernel": 0.1}
    assert any("learning_rate[1].alpha has no effect" in notice for notice in run.notices)


def test_inverse_square_root_decay(tmp_path):
    rate = "[{scheduler: InverseSquareRootDecay, warmup_steps: 4, scale: 2.0}]"
    run = load_params(older(tmp_path, changed("learning_rate: 0.001", f"learning_rate: {rate}")))
    assert [run.init.schedule.value(step) for step in (0, 4, 16)] == [1.0, 1.0, 0.5]


def test_states_to_load_and_norms_to_log_are_callbacks(tmp_path):
    text = changed("epsilon: 1e-6", "log_summaries: true") + "  load_checkpoint_states: model, optimizer\n"
    init = load_params(older(tmp_path, text)).init
    assert (init.compute_norm, init.checkpoint_states) == (True, ("model", "optimizer"))


def test_sparsity_by_regular_expressions(tmp_path):
    section = """\
sparsity:
  type: rigl
  sparsity: 0.5
  init_method: random
  drop_fraction: {type: cosine, init: 0.3, half_period: 10}
  schedule: {freq: 5, stop: 10}
  param_name_patterns: ['.*proj_[qkv]_dense_layer.weight']
"""
    sparsity = load_params(older(tmp_path, GPT + section)).init.sparsity[0]
    assert (sparsity.algorithm, sparsity.update.freq) == ("rigl", 5)
    assert sparsity.param_filter == ("*proj_[qkv]_dense_layer.weight",)
    with pytest.raises(ConfigError, match="cannot be converted to a pattern"):
        load_params(older(tmp_path, GPT + section.replace("'.*proj", "'(a|b)proj")))


def test_the_policy_of_older_dpo_files_gets_its_own_section(tmp_path):
    text = changed("model:\n", "model:\n  dpo: {beta: 0.01}\n  model_name: mistral\n")
    data = changed(
        "GptHDF5DataProcessor\n  data_dir: data/train\n  max_sequence_length: 16\n",
        "DpoHDF5DataProcessor\n  data_dir: data/train\n",
        text,
    )
    model = load_params(older(tmp_path, data.replace("  repeat: true\n", ""), "dpo/configs")).init.model
    assert (model.name, model.policy_model.name, model.policy_model.hidden_size) == ("dpo", "mistral", 32)


DIGITS = """\
train_input: {data_dir: mnist, batch_size: 4, drop_last_batch: true}
eval_input: {data_dir: mnist, batch_size: 4}
model: {name: fc_mnist, mixed_precision: true, depth: 10, hidden_size: 50}
optimizer: {optimizer_type: SGD, learning_rate: 0.001, momentum: 0.9}
runconfig: {num_epochs: 2, steps_per_epoch: 1000, max_steps: 1500}
csconfig: {use_cbfloat16: false}
"""


def test_older_mnist_files_get_their_data_processor(tmp_path):
    run = load_params(older(tmp_path, DIGITS, "fc_mnist"))
    assert (run.fit.train_dataloader.split, run.validation.val_dataloader.split) == ("train", "val")
    assert run.init.loop.end_step(0) == 1500


@pytest.mark.parametrize(("given", "end"), [("max_steps: 1500", 1500), ("max_steps: 2500", 2000)])
def test_the_first_of_several_lengths_ends_the_run(tmp_path, given, end):
    run = load_params(older(tmp_path, DIGITS.replace("max_steps: 1500", given), "fc_mnist"))
    assert run.init.loop.end_step(0) == end


UNET = """\
train_input:
  {data_processor: UNetDataProcessor, data_dir: d, image_shape: [64, 32, 1], num_classes: 2, batch_size: 4}
model:
  nonlinearity: ReLU
  skip_connect: true
  enable_bias: false
  downscale_method: max_pool
  convs_per_block: [3x3_conv, 3x3_conv, 3x3_conv]
  encoder_filters: [8, 16, 32]
  decoder_filters: [16, 8]
  residual_blocks: false
  initializer: {name: glorot_uniform, gain: 1.0}
  bias_initializer: zeros
  loss: ssce
  mixed_precision: true
optimizer: {optimizer_type: Adam, learning_rate: 0.0001}
runconfig: {max_steps: 10}
"""


def test_a_unet_with_lists_of_convolutions(tmp_path):
    model = load_params(older(tmp_path, UNET, "unet/configs")).init.model
    assert (model.convs_per_block, model.encoder_filters, model.image_size) == (3, (8, 16, 32), (64, 32))
    assert (model.input_channels, model.num_classes, model.loss) == (1, 2, "cross_entropy")


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("[3x3_conv, 3x3_conv, 3x3_conv]", "[3x3_conv, 1x1_conv]", "convs_per_block"),
        ("[16, 8]", "[16, 16]", "decoder_filters"),
        ("max_pool", "strided_conv", "expected downscale_method: 'max_pool', found 'strided_conv'"),
    ],
)
def test_other_unets_are_refused(tmp_path, old, new, what):
    with pytest.raises(ConfigError, match=what):
        load_params(older(tmp_path, changed(old, new, UNET), "unet/configs"))


def test_a_scaled_similarity_is_a_temperature(tmp_path):
    tower = "{hidden_size: 64, num_heads: 4, filter_size: 64, num_hidden_layers: 1, mixed_precision: true}"
    text = f"""\
model: {{q_encoder: {tower}, ctx_encoder: {tower}, scale_similarity: true}}
optimizer: {{optimizer_type: Adam, learning_rate: 0.1}}
runconfig: {{max_steps: 1}}
"""
    init = load_params(older(tmp_path, text, "dpr")).init
    assert (init.model.softmax_temperature, init.precision.enabled) == (8.0, True)


def test_dynamic_mlm_scale_of_the_data_scales_the_models_loss(tmp_path):
    text = """\
train_input:
  {data_processor: BertCSVDataProcessor, data_dir: d, batch_size: 2, dynamic_mlm_scale: true, buckets: [4]}
model: {hidden_size: 32, num_heads: 2, filter_size: 32, num_hidden_layers: 1, attention_kernel: default}
optimizer: {optimizer_type: Adam, learning_rate: 0.1}
runconfig: {max_steps: 1}
"""
    assert load_params(older(tmp_path, text, "bert")).init.model.mlm_loss_scaling == "num_masked"


NEWER = """\
trainer:
  init:
    model: {model_name: gpt2, hidden_size: 32, num_heads: 2, mixed_precision: true, fp16_type: bfloat16}
    callbacks: [{EleutherEvalHarness: {eeh_args: {tasks: winogrande}}}]
"""


def test_a_file_that_only_evaluates_needs_no_optimizer(tmp_path):
    run = load_params(write(tmp_path, NEWER))
    assert (run.init.model.name, run.fit) == ("gpt2", None)
    assert run.init.precision.precision == Precision("bf16")
    assert run.init.eleuther_harnesses[0].eeh_args.names == ["winogrande"]


def test_contradicting_precision_keys_are_refused(tmp_path):
    text = NEWER + "    precision: {fp16_type: float16}\n"
    with pytest.raises(ConfigError, match="have the same meaning, but different values"):
        load_params(write(tmp_path, text))


def test_every_public_file_loads():
    files = sorted(public_params().rglob("*.yaml"))
    assert len(files) == 113
    for path in files:
        load_params(path)
