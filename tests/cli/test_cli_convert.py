"""`headwater checkpoint convert`, `diff` and `list-converters`."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.cli.main import main

transformers = pytest.importorskip("transformers")


@pytest.fixture
def llama(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path / "hf"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def convert(source, target, before, after, *more, model="llama"):
    formats = ["--src-fmt", source, "--tgt-fmt", target]
    return main(["checkpoint", "convert", "--model", model, *formats, *more, str(before), str(after)])


def diff(first, second):
    return main(["checkpoint", "diff", str(first), str(second)])


def test_there_and_back_to_the_same_bits(tmp_path, llama, capsys):
    assert convert("hf", "headwater", llama / "model.safetensors", tmp_path / "own") == 0
    assert convert("headwater", "hf", tmp_path / "own", tmp_path / "back") == 0
    assert diff(llama, tmp_path / "back") == 0
    assert "the same, bit for bit" in capsys.readouterr().out


def test_differences_are_named(tmp_path, llama, capsys):
    convert("hf", "headwater", llama, tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    tensors["norm.weight"][3] += 0.5
    tensors["head.weight"] = torch.zeros(2)
    tensors["more"] = tensors.pop("embedding.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert diff(tmp_path / "own", tmp_path) == 1
    lines = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if "." in line or "more" in line
    }
    assert "values, by up to 0.5" in lines["norm.weight"]
    assert "[61, 32] and [2]" in lines["head.weight"]
    assert "only in" in lines["embedding.weight"] and "only in" in lines["more"]


def test_halves(tmp_path, llama):
    assert convert("hf", "headwater", llama, tmp_path / "own", "--dtype", "bf16") == 0
    assert {t.dtype for t in load_file(tmp_path / "own" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ("hf", "headwater", "hf", "out"),
            {"model": "gptj"},
            "the config is of a LlamaForCausalLM, and not of a GPTJForCausalLM",
        ),
        (("hf", "headwater", "hf", "out"), {"model": "lama"}, "write llama; models are"),
        (("hf", "hf", "hf", "out"), {}, "both formats are hf"),
        (("hf", "headwater", "none", "out"), {}, "no such folder"),
        (("headwater", "hf", "own", "out"), {"model": "gpt2"}, "the model is a llama"),
        (("hf", "headwater", "hf", "own"), {}, "not empty"),
        (("headwater", "hf", "hf", "out"), {}, "cannot read the model's section"),
        (
            ("cs-2.3", "headwater", "hf", "out"),
            {},
            "invalid choice: 'cs-2.3' (choose from 'hf', 'headwater')",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, llama, capsys, arguments, options, message):
    convert("hf", "headwater", llama, tmp_path / "own")
    source, target, before, after = arguments
    assert convert(source, target, tmp_path / before, tmp_path / after, **options) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tensor_without_a_place_is_named_with_the_nearest(tmp_path, llama, capsys):
    path = llama / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_projj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    save_file(tensors, path)
    assert convert("hf", "headwater", llama, tmp_path / "own") == 2
    message = capsys.readouterr().err
    assert "model.layers.1.mlp.up_projj.weight has no place" in message
    assert "nearest known names are model.layers.1.mlp.up_proj.weight" in message
    assert not (tmp_path / "own").exists()


def test_list(capsys):
    assert main(["checkpoint", "list-converters"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
