"""The JSON Schema of params files, applied by the jsonschema library to shipped and to public files."""

import inspect
import json

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from params_samples import NEWER, OLDER, public_params, write

from headwater.cli.main import main
from headwater.config import json_schema, shipped_params
from headwater.config.json_schema import params_schema
from headwater.config.sections import BackendConfig
from headwater.config.yaml_reader import read_document

EXTENDING = """\
extends: gpt/tiny
trainer:
  init: {model_dir: runs/book, optimizer: {adamw: {weight_decay: 0.0}}, callbacks: computenorm}
  fit:
    train_dataloader: {data_dir: [a, b]}
    val_dataloader: {data_dir: c}
"""
HF = (
    "trainer: {init: {model: {hf: folder, freeze: ['a.*']}, backend: {backend_type: cpu, host_memory: 8GiB}}}"
)
SPARSE = (
    "trainer: {init: {sparsity: {sparsity: 0.5, drop_fraction: {type: cosine, init: 0.3, half_period: 9}}}}"
)


@pytest.fixture(scope="module")
def schema():
    return Draft202012Validator(params_schema())


@pytest.fixture
def fault(schema, tmp_path):
    """Returns a function: where a text is wrong and why, or None if it is valid."""

    def find(text):
        error = best_match(schema.iter_errors(read_document(write(tmp_path, text)).tree))
        return None if error is None else (".".join(map(str, error.absolute_path)), error.message)

    return find


def faults(schema, paths):
    return {path: error.message for path in paths for error in schema.iter_errors(read_document(path).tree)}


def test_the_schema_follows_the_draft_that_it_names(schema):
    assert schema.schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema.schema)


def test_every_shipped_file_is_valid(schema):
    assert faults(schema, shipped_params().values()) == {}


def test_every_public_file_is_valid(schema):
    files = sorted(public_params().rglob("*.yaml"))
    assert len(files) == 113
    assert faults(schema, files) == {}


@pytest.mark.parametrize("text", [NEWER, OLDER, EXTENDING, HF, SPARSE])
def test_a_valid_text(text, fault):
    assert fault(text) is None


@pytest.mark.parametrize(
    ("text", "right", "wrong", "where"),
    [
        (NEWER, "hidden_size", "hiden_size", "trainer.init.model"),
        (NEWER, "shuffle", "shufle", "trainer.fit.train_dataloader"),
        (NEWER, "betas", "beta", "trainer.init.optimizer"),
        (NEWER, "max_steps", "max_step", "trainer.init.loop"),
        (NEWER, "  fit:", "  fitt:", "trainer"),
        (OLDER, "hidden_size", "hiden_size", "model"),
        (OLDER, "weight_decay_rate", "weight_decay_rat", "optimizer"),
        (OLDER, "max_checkpoints", "max_checkpoint", "runconfig"),
        (OLDER, "runconfig", "runconfigs", ""),
        (EXTENDING, "train_dataloader", "train_dataloder", "trainer.fit"),
        (EXTENDING, "data_dir: c", "data_dirs: c", "trainer.fit.val_dataloader"),
        (HF, "freeze", "freze", "trainer.init.model"),
        (SPARSE, "half_period", "half_periods", "trainer.init.sparsity"),
    ],
)
def test_a_misspelled_key_is_found_where_it_is(text, right, wrong, where, fault):
    assert text.count(right)
    found, _ = fault(text.replace(right, wrong))
    assert found.startswith(where)


@pytest.mark.parametrize(
    ("right", "wrong", "where"),
    [
        ("num_heads: 4", "num_heads: four", "trainer.init.model.num_heads"),
        ("seed: 7", "seed: -7", "trainer.init.seed"),
        ("name: gpt2", "name: gpt9", "trainer.init.model.name"),
        ("micro_batch_size: 2", "host_memory: [8]", "trainer.init.backend.host_memory"),
        ("fp16_type: bfloat16", "fp16_type: bfloat17", "trainer.init.precision.fp16_type"),
    ],
)
def test_a_wrong_value_is_found_where_it_is(right, wrong, where, fault):
    found, _ = fault(NEWER.replace(right, wrong))
    assert found == where


def test_the_two_forms_do_not_mix(fault):
    assert fault(NEWER + "runconfig: {seed: 1}\n") is not None


def test_editors_show_what_a_key_means(schema):
    loop = schema.schema["$defs"]["LoopConfig"]["properties"]
    assert loop["num_epochs"]["description"].startswith("Number of passes over the training data.")
    loader = schema.schema["$defs"]["GptDataConfig"]["properties"]
    assert loader["use_worker_cache"]["deprecated"]
    assert loader["batch_size"]["description"] == "Samples of one step over all ranks."


def test_the_command_prints_the_schema_or_writes_it(tmp_path, capsys):
    assert main(["config", "schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == params_schema()
    path = tmp_path / "headwater.schema.json"
    assert main(["config", "schema", "--output", str(path)]) == 0
    assert path.read_text() == printed
    assert "yaml-language-server: $schema=headwater.schema.json" in capsys.readouterr().out


def test_a_folder_that_does_not_exist(tmp_path, capsys):
    path = tmp_path / "missing" / "schema.json"
    assert main(["config", "schema", "--output", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_descriptions_are_found_in_docstrings_without_indentation():
    """Python 3.13 removes the indentation of docstrings when it compiles a module."""
    indented = BackendConfig.__doc__
    expected = list(json_schema._listed(indented))
    assert len(expected) > 5
    assert list(json_schema._listed(inspect.cleandoc(indented))) == expected
