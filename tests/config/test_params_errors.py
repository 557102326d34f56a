"""Bad params files: each error names file, line, key and what to write instead."""

# ruff: noqa: E501  (tables of cases are read in rows)

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from params_samples import NEWER, OLDER, write

from headwater.config import load_params
from headwater.config.files import find_params
from headwater.config.yaml_reader import parse_yaml, read_document
from headwater.core.errors import ConfigError


def assert_place(error, path, key):
    """The error is at `key`, and at a line of the file where its last part is written."""
    match = re.fullmatch(rf"{re.escape(str(path))}, line (\d+)(?:: (.+))?", error.where)
    assert match, error.where
    assert (match[2] or "") == key
    line = path.read_text().splitlines()[int(match[1]) - 1]
    parts = [part for part in re.split(r"[.\[\]]+", key) if part]
    entry = key.endswith("]") and line.lstrip().startswith("-")
    assert not key or entry or any(part in line for part in parts[-2:])


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_params(path, overrides)
    return caught.value


CASES = [
    # what is in the file, what is there instead, place, what, remedy
    ("hidden_size:", "hiden_size:", "trainer.init.model.hiden_size", "unknown key 'hiden_size'", "'hidden_size'"),
    ("loop:", "lop:", "trainer.init.lop", "unknown key 'lop'", "'loop'"),
    ("trainer:", "trianer:", "trianer", "unknown key 'trianer'", "'trainer'"),
    ("AdamW:", "AdamX:", "trainer.init.optimizer.AdamX", "unknown key 'AdamX'", "'Adamax'"),
    ("LinearLR:", "LinearRL:", "trainer.init.schedulers[0].SequentialLR.schedulers[0].LinearRL",
     "unknown key 'LinearRL'", "'LinearLR'"),
    ("- ComputeNorm", "- ComputNorm", "trainer.init.callbacks[0].ComputNorm", "unknown key", "'ComputeNorm'"),
    ("max_steps: 100", "max_steps: 1e3", "trainer.init.loop.max_steps",
     "expected max_steps to be an integer, got 1000.0", "write an integer"),
    ("max_steps: 100", "max_steps: many", "trainer.init.loop.max_steps", "got 'many'", "an integer"),
    ("max_steps: 100", "max_steps: 0", "trainer.init.loop.max_steps", "expected max_steps to be a number >= 1, got 0", ">= 1"),
    ("max_steps: 100", "max_steps: null", "trainer.init.loop", "expected max_steps, num_steps or num_epochs", "add max_steps: 1000"),
    ("enabled: true", "enabled: 1", "trainer.init.precision.enabled", "expected enabled to be true or false, got 1", "true"),
    ("fp16_type: bfloat16", "fp16_type: bfloat", "trainer.init.precision.fp16_type",
     "one of bfloat16, float16, cbfloat16, got 'bfloat'", "'bfloat16'"),
    ("max_gradient_norm: 1.0", "max_gradient_norm: .nan", "trainer.init.precision.max_gradient_norm",
     "finite number, got nan", "finite"),
    ("log_loss_scale: true", "max_gradient_value: 1.0", "trainer.init.precision", "cannot be used together", "change max_gradient_norm or max_gradient_value"),
    ("betas: [0.9, 0.95]", "betas: [0.9]", "trainer.init.optimizer.AdamW.betas", "betas", "betas"),
    ("betas: [0.9, 0.95]", "betas: [0.9, 1.0]", "trainer.init.optimizer.AdamW.betas[1]", "expected betas[1] to be a number < 1.0, got 1.0", "< 1.0"),
    ("betas: [0.9, 0.95]", "betas: 0.9", "trainer.init.optimizer.AdamW.betas", "expected betas to be a list, got 0.9", "list"),
    ("betas: [0.9, 0.95]", "correct_bias: false", "trainer.init.optimizer.AdamW.correct_bias", "got False", "True"),
    ("num_heads: 4", "num_heads: 5", "trainer.init.model", "hidden_size (32) is not a multiple of num_heads (5)",
     "change hidden_size or num_heads"),
    ("num_heads: 4", "num_heads: 4\n      mup_base_hidden_size: 8", "trainer.init.model", "expected both or none", "change mup_base_hidden_size"),
    ("name: gpt2", "name: gtp2", "trainer.init.model.name", "unknown model 'gtp2'", "write 'gpt2'; available: bert"),
    ("name: gpt2", "vocab_size: 3\n      vocab_size: 4", "", "the key vocab_size occurs twice", "remove one"),
    ("      name: gpt2\n", "", "trainer.init.model.name", "the key 'name' of the model is missing", "gpt2"),
    ("micro_batch_size: 2", "device_memory: lots", "trainer.init.backend.device_memory", "expected a size in bytes", "write for example"),
    ("micro_batch_size: 2", "tier: disk", "trainer.init.backend", "tier is disk, but no disk folder is given", "disk: {path: FOLDER}"),
    ("micro_batch_size: 2", "disk: /tmp", "trainer.init.backend.disk", "expected disk to be a mapping of keys, got '/tmp'",
     "mapping"),
    ("num_csx: 2", "num_csx: 0", "trainer.init.backend.cluster_config.num_csx", ">= 1, got 0", ">= 1"),
    ("keep_n: 3", "keep_n: 3\n    callbacks: []", "", "the key callbacks occurs twice", "remove one"),
    ("- ComputeNorm: {}", "- KeepNCheckpoints: {n: 2}", "trainer.init", "keep_n and the callbacks", "change checkpoint"),
    ("data_processor: GptHDF5DataProcessor", "data_processor: GptHDF5Processor",
     "trainer.fit.train_dataloader.data_processor", "got 'GptHDF5Processor'", "'GptHDF5DataProcessor'"),
    ("data_dir: data/train", "data_dir: 3", "trainer.fit.train_dataloader.data_dir", "expected data_dir to be text, got 3", "text"),
    ("      data_dir: data/train\n", "", "trainer.fit.train_dataloader.data_dir", "'data_dir' is missing", "add data_dir"),
    ("    seed: 7", "   seed: 7", "", "cannot be parsed", "quotes"),
    ("total_iters: 10\n", "total_iters: 10\n        milestones: [10]\n", "", "cannot be parsed", "quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "place", "what", "remedy"), CASES)
def test_bad_values(tmp_path, old, new, place, what, remedy):
    assert old in NEWER
    path = write(tmp_path, NEWER.replace(old, new, 1))
    error = error_of(path)
    assert what in error.what
    assert remedy in error.remedy
    assert_place(error, path, place)


def test_a_list_of_a_wrong_length(tmp_path):
    path = write(tmp_path, NEWER)
    schedule = "{MultiStepLR: {initial_learning_rate: 1.0, gamma: 0.5, milestones: []}}"
    error = error_of(path, f"trainer.init.schedulers=[{schedule}]")
    assert error.what == "expected milestones to be a list of at least 1 entry, got a list of 0 entries"
    assert error.remedy == "write a list of at least 1 entry"


OLDER_CASES = [
    ("max_steps: 100", "max_stpes: 100", "runconfig.max_stpes", "unknown key 'max_stpes'", "'max_steps'"),
    ("max_steps: 100", "max_steps: many", "runconfig.max_steps", "expected max_steps to be an integer", "an integer"),
    ("beta1: 0.9", "beta1: x", "optimizer.beta1", "expected beta1 to be a number, got 'x'", "number"),
    ("beta2: 0.95", "beta2: 1", "optimizer.beta2", "expected beta2 to be a number < 1.0, got 1", "< 1.0"),
    ("weight_decay_rate: 0.1", "weight_decay_rate: x", "optimizer.weight_decay_rate", "to be a number", "number"),
    ("weight_decay_rate: 0.1", "weight_dcay: 0.1", "optimizer.weight_dcay", "unknown key", "'weight_decay'"),
    ("optimizer_type: adamw", "optimizer_type: adamx", "optimizer.optimizer_type", "unknown key 'adamx'", "'Adamax'"),
    ("  optimizer_type: adamw\n", "", "optimizer", "the key 'optimizer_type' is missing", "optimizer_type: AdamW"),
    ("scheduler: Linear", "scheduler: Linaer", "optimizer.learning_rate[0]", "unknown key 'Linaer'", "'LinearLR'"),
    ("- scheduler: Linear", "- name: Linear", "optimizer.learning_rate[0]", "with the key scheduler", "Linear"),
    ("steps: 10", "steps: 1.5", "optimizer.learning_rate[0].steps", "expected steps to be an integer, got 1.5", "an integer"),
    ("hidden_size: 32", "hidden_size: -1", "model.hidden_size", ">= 1, got -1", ">= 1"),
    ("mixed_precision: true", "mixed_precision: 1", "model.mixed_precision", "true or false", "true"),
    ("max_checkpoints: 3", "max_checkpoints: 0", "runconfig.max_checkpoints", ">= 1", ">= 1"),
    ("num_csx: 2", "num_csx: two", "runconfig.num_csx", "an integer, got 'two'", "an integer"),
    ("batch_size: 4", "batch_size: four", "eval_input.batch_size", "expected batch_size to be an integer, got 'four'", "an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "place", "what", "remedy"), OLDER_CASES)
def test_errors_name_keys_of_the_older_form(tmp_path, old, new, place, what, remedy):
    assert old in OLDER
    path = write(tmp_path, OLDER.replace(old, new, 1))
    error = error_of(path)
    assert what in error.what
    assert remedy in error.remedy
    assert_place(error, path, place)


def test_a_problem_of_an_older_section_counts_once(tmp_path):
    error = error_of(write(tmp_path, OLDER.replace("batch_size: 4", "batch_size: four")))
    assert "more" not in error.what


def test_further_problems_are_listed(tmp_path):
    path = write(tmp_path, NEWER.replace("seed: 7", "seed: x").replace("steps: 50", "steps: y"))
    error = error_of(path)
    assert error.where == f"{path}, line 8: trainer.init.seed" or error.where.endswith("seed")
    assert "and 1 more:" in error.what
    assert "trainer.init.checkpoint.steps" in error.what


@pytest.mark.parametrize("second", ["SGD", "adamw"])
def test_two_optimizers_are_refused(tmp_path, second):
    more = f"      {second}: {{lr: 0.1}}\n    schedulers:\n    - Seq"
    error = error_of(write(tmp_path, NEWER.replace("    schedulers:\n    - Seq", more)))
    assert error.what == f"expected one name in optimizer, got AdamW, {second}"
    assert "set them to null" in error.remedy


def test_an_optimizer_beside_that_of_the_extended_file(tmp_path):
    write(tmp_path, NEWER).rename(tmp_path / "base.yaml")
    child = write(tmp_path, "extends: base.yaml\ntrainer:\n  init: {optimizer: {SGD: {}}}\n")
    error = error_of(child)
    assert error.what == "expected one name in optimizer, got AdamW, SGD"
    assert "base.yaml, which is extended: write AdamW: null beside SGD" in error.remedy


@pytest.mark.parametrize("text", ["", "- 1", "3", "model"])
def test_a_params_file_is_a_mapping_with_a_trainer(tmp_path, text):
    error = error_of(write(tmp_path, text))
    assert "trainer" in f"{error.what} {error.remedy}"


@pytest.mark.parametrize("text", ["trainer: 3", "trainer:", "trainer: {init: [1]}", "trainer: {init: null}"])
def test_sections_of_the_wrong_kind(tmp_path, text):
    error = error_of(write(tmp_path, text))
    assert "mapping" in error.what
    assert error.where.split(": ")[1].startswith("trainer")


@pytest.mark.parametrize("section", ["model", "optimizer", "runconfig", "eval_input"])
def test_older_sections_of_the_wrong_kind(tmp_path, section):
    error = error_of(write(tmp_path, f"{section}: 3"))
    assert error.what == "expected a mapping of keys, found 3"
    assert error.where.endswith(f"line 1: {section}")


def test_several_phases_are_refused(tmp_path):
    error = error_of(write(tmp_path, "trainer:\n- trainer: {init: {}}\n"))
    assert "list of phases" in error.what


def test_a_file_that_is_not_there(tmp_path):
    error = error_of(tmp_path / "none.yaml")
    assert "cannot be read" in error.what
    assert str(tmp_path / "none.yaml") in error.where


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    error = error_of(path)
    assert "cannot be read" in error.what and error.remedy == "save it in UTF-8"


def test_a_tab_as_indentation(tmp_path):
    error = error_of(write(tmp_path, "trainer:\n\tinit: {}\n"))
    assert error.where.endswith("line 2") and error.remedy == "indent with spaces instead of tabs"


@pytest.mark.parametrize(
    "change", [lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")]
)
def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(change, tmp_path):
    text = NEWER.encode()
    (tmp_path / "as_it_is.yaml").write_bytes(text)
    (tmp_path / "changed.yaml").write_bytes(change(text))
    trees = [read_document(tmp_path / name).tree for name in ("as_it_is.yaml", "changed.yaml")]
    assert trees[0] == trees[1]


def test_a_misspelt_file_name(tmp_path):
    write(tmp_path, "trainer: {}").rename(tmp_path / "book.yaml")
    with pytest.raises(ConfigError) as refused:
        find_params(tmp_path / "bok.yaml")
    assert refused.value.remedy.startswith(f"write '{tmp_path / 'book.yaml'}'")
    with pytest.raises(ConfigError, match="there is no params file"):
        find_params(f"{'long' * 2000}/bok.yaml")


KEYS = sorted({line.strip("- ").split(":")[0] for line in NEWER.splitlines() if ":" in line} - {"data_dir"})


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), letter=st.sampled_from("xq_"), at=st.integers(0, 30))
def test_any_misspelt_key_is_found_by_name(tmp_path, key, letter, at):
    at = min(at, len(key))
    wrong = key[:at] + letter + key[at:]
    path = write(tmp_path, NEWER.replace(f"{key}:", f"{wrong}:", 1))
    error = error_of(path)
    # of the keys that contain another one, the first in the file is hit
    assert (
        f"{letter}" in error.where.split("line ")[1]
        or "has no name" in error.what
        or "is missing" in error.what
    )


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(deadline=None, max_examples=150)
@given(
    value=TREES,
    section=st.sampled_from(["backend", "optimizer", "schedulers", "callbacks", "loop", "model", "seed"]),
)
def test_any_invalid_value_is_a_config_error(value, section, tmp_path_factory):
    path = write(tmp_path_factory.getbasetemp(), NEWER, "fuzz.yaml")
    try:
        load_params(path, {f"trainer.init.{section}": value})
    except ConfigError as error:
        assert error.where
        assert error.remedy


@settings(deadline=None)
@given(text=st.text(alphabet="abc:-[]{}&*?!|>'\" \n#", max_size=40))
def test_any_text_is_a_document_or_a_config_error(text):
    try:
        document = parse_yaml(text, "fuzz.yaml")
    except ConfigError as error:
        assert "fuzz.yaml" in error.where
    else:
        assert isinstance(document.tree, dict)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("name: gpt2", "name: {a: 1}", "unknown model"),
        ("name: gpt2", "name: " + "x" * 100_000, "unknown model"),
        ("model_dir: runs/a", 'model_dir: "a\\0b"', "a path must not contain null characters"),
        ("model_dir: runs/a", 'model_dir: ""', "expected a path, got an empty text"),
        ("seed: 7", "seed: " + "x" * 100_000, "expected seed to be an integer, got 'xxx"),
        ("seed: 7", "k" * 1000 + ": 7", "unknown key 'kkk"),
        ("trainer:", "extends: " + "x" * 100_000 + "\ntrainer:", "there is no params file 'xxx"),
        ("trainer:", "extends: ~nobody/x\ntrainer:", "there is no params file '~nobody/x'"),
    ],
    ids=range(8),
)
def test_errors_of_odd_values_are_short(tmp_path, old, new, what):
    assert old in NEWER
    with pytest.raises(ConfigError) as raised:
        load_params(write(tmp_path, NEWER.replace(old, new, 1)))
    assert what in raised.value.what
    assert len(raised.value.what) < 400
    assert len(str(raised.value)) < 5000


def test_the_folder_of_an_unknown_user_is_taken_as_written(tmp_path):
    path = write(tmp_path, NEWER.replace("model_dir: runs/a", "model_dir: ~nobody_here/a"))
    assert str(load_params(path).init.model_dir) == "~nobody_here/a"


def test_many_problems_are_counted_and_few_are_listed(tmp_path):
    callbacks = "[" + ", ".join(f"{{No{index}: {{}}}}" for index in range(1000)) + "]"
    text = NEWER.replace("    callbacks:\n    - ComputeNorm: {}\n", f"    callbacks: {callbacks}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'No0' \(and 999 more: .*, …\)") as raised:
        load_params(write(tmp_path, text))
    assert len(str(raised.value)) < 2000


def test_a_mapping_as_the_name_of_a_policy(tmp_path):
    path = write(tmp_path, "trainer: {init: {model: {name: dpo, policy_model: {name: {a: 1}}}}}")
    with pytest.raises(ConfigError, match=r"expected name to be one of gpt2, .*, got a mapping"):
        load_params(path)


def test_a_file_that_is_too_large_is_told_by_its_size(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("#" + "é" * 100_000)  # the limit cuts a character
    assert "larger than 128 KiB" in error_of(path).what
