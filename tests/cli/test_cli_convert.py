"""`headwater checkpoint convert`, `diff` and `list-converters`."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.cli.main import main
from headwater.convert.formats import CONVERTERS
from headwater.trainer.comparison import compare

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


def test_conversion_to_hf_and_back_is_bit_identical(tmp_path, llama, capsys):
    assert convert("hf", "headwater", llama / "model.safetensors", tmp_path / "own") == 0
    assert convert("headwater", "hf", tmp_path / "own", tmp_path / "back") == 0
    assert diff(llama, tmp_path / "back") == 0
    assert "the same, bit for bit" in capsys.readouterr().out
    # A folder of transformers and its converted form are compared by meaning.
    for first, second in ((llama, "own"), ("own", llama)):
        assert diff(tmp_path / first, tmp_path / second) == 0
        assert "17 equal, 0 differ, 0 only in A, 0 only in B" in capsys.readouterr().out


def test_a_run_starts_from_a_converted_folder(tmp_path, llama, capsys):
    convert("hf", "headwater", llama, tmp_path / "own", "--dtype", "bf16")
    run = tmp_path / "run"
    assert main(["checkpoint", "import", str(tmp_path / "own"), "--model_dir", str(run)]) == 0
    assert diff(tmp_path / "own", run) == 0
    assert "17 equal (17 in another dtype), 0 differ, 0 only in A, 0 only in B" in capsys.readouterr().out
    assert (run / "generation_config.json").is_file()


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


def test_conversion_to_16_bit_dtypes(tmp_path, llama):
    assert convert("hf", "headwater", llama, tmp_path / "own", "--dtype", "bf16") == 0
    assert {t.dtype for t in load_file(tmp_path / "own" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ("hf", "headwater", "hf", "out"),
            {"model": "gptj"},
            "expected the config of a GPTJForCausalLM, got that of a LlamaForCausalLM",
        ),
        (("hf", "headwater", "hf", "out"), {"model": "lama"}, "write llama; available: bert"),
        (("hf", "hf", "hf", "out"), {}, "source and target format are both hf"),
        (("hf", "headwater", "none", "out"), {}, "the checkpoint does not exist"),
        (
            ("headwater", "hf", "own", "out"),
            {"model": "gpt2"},
            "expected a model that --model gpt2 converts, found llama",
        ),
        (("hf", "headwater", "hf", "own"), {}, "not empty"),
        (("headwater", "hf", "hf", "out"), {}, "the model section cannot be read"),
        (("cs2", "headwater", "hf", "out"), {}, "expected hf, headwater or cs-X.Y, found 'cs2'"),
        (("cs-2.3", "headwater", "hf", "out"), {}, "cs-2.3 and headwater both mean the format headwater"),
        (
            ("hf", "headwater", "hf", "out"),
            {"model": "lama-headless"},
            "write llama-headless; available: bert",
        ),
        (("hf", "headwater", "hf", "out"), {"model": "bert-headles"}, "write bert-headless; available: bert"),
    ],
)
def test_errors_of_convert(tmp_path, llama, capsys, arguments, options, message):
    convert("hf", "headwater", llama, tmp_path / "own")
    source, target, before, after = arguments
    assert convert(source, target, tmp_path / before, tmp_path / after, **options) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_error_for_an_unknown_tensor_names_the_nearest_known_tensor(tmp_path, llama, capsys):
    path = llama / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_projj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    save_file(tensors, path)
    assert convert("hf", "headwater", llama, tmp_path / "own") == 2
    message = capsys.readouterr().err
    assert "model.layers.1.mlp.up_projj.weight does not belong to this model" in message
    assert "most similar names are model.layers.1.mlp.up_proj.weight" in message
    assert not (tmp_path / "own").exists()


def test_the_list_of_converters_has_whole_names(capsys):
    assert main(["checkpoint", "list-converters"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM" in printed
    assert {line.split()[0] for line in printed.splitlines() if line.strip()} >= set(CONVERTERS), (
        "whole names"
    )


def test_the_command_line_of_the_model_zoo_works_unchanged(tmp_path, capsys):
    folder = tmp_path / "my_checkpoints"
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "rotary_dim": 8}
    torch.manual_seed(0)
    theirs = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes))
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    words = f"""convert --model gptj --src-fmt hf --tgt-fmt cs-2.2 --output-dir {folder}/
        --config {folder}/config.json {folder}/pytorch_model.bin"""
    assert main(["checkpoint", *words.split()]) == 0
    made = folder / "pytorch_model_to_cs-2.2"
    assert str(made) in capsys.readouterr().out
    assert (made / "model.yaml").is_file()
    back = ("--model", "gptj", "--src-fmt", "cs-2.2", "--tgt-fmt", "hf", str(made), str(tmp_path / "back"))
    assert main(["checkpoint", "convert", *back]) == 0
    again = transformers.GPTJForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in theirs.state_dict().items())
    assert diff(folder, made) == 0


@pytest.mark.parametrize("given", [(), ("out", "--output-dir", "dir")])
def test_the_output_is_named_exactly_once(llama, capsys, given):
    words = ("--model", "llama", "--src-fmt", "hf", "--tgt-fmt", "headwater", str(llama), *given)
    assert main(["checkpoint", "convert", *words]) == 2
    assert "expected OUT or --output-dir" in capsys.readouterr().err


def test_diff_of_a_changed_folder_ends_with_a_summary(tmp_path, llama, capsys):
    convert("hf", "headwater", llama, tmp_path / "own", "--dtype", "bf16")
    assert diff(llama, tmp_path / "own") == 1
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "5 equal (5 in another dtype), 12 differ, 0 only in A, 0 only in B"
    )
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"more": torch.zeros(1)}, llama / "model.safetensors")
    convert("headwater", "hf", tmp_path / "own", tmp_path / "back")
    assert diff(llama, tmp_path / "back") == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 only in A, 1 only in B")


def test_info_describes_folders_in_both_formats(tmp_path, llama, capsys):
    convert("hf", "headwater", llama, tmp_path / "own", "--dtype", "bf16")
    capsys.readouterr()
    own = tmp_path / "own"
    for folder, model, dtype in ((llama, "LlamaForCausalLM", "float32"), (own, "llama", "bfloat16")):
        assert main(["checkpoint", "info", str(folder), "--verify"]) == 0
        line = capsys.readouterr().out.splitlines()[1].split()
        assert line[1] == model
        assert dtype in line


def test_conversion_keeps_tokenizer_files(tmp_path, llama):
    (llama / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (llama / "chat_template.jinja").write_text("{{ messages }}")
    assert convert("hf", "headwater", llama, tmp_path / "own") == 0
    assert convert("headwater", "hf", tmp_path / "own", tmp_path / "back") == 0
    assert (tmp_path / "back/tokenizer_config.json").read_text() == '{"eos_token": "</s>"}'
    assert (tmp_path / "back/chat_template.jinja").read_text() == "{{ messages }}"


def compared(folder, first, second):
    """Return the comparison of two checkpoints with one tensor each."""
    for name, tensor in (("first", first), ("second", second)):
        (folder / name).mkdir()
        save_file({"weight": tensor}, folder / name / "model.safetensors")
    return compare(folder / "first", folder / "second")


def test_equal_values_in_another_dtype_are_not_called_the_same_bit_for_bit(tmp_path):
    found = compared(tmp_path, torch.ones(3), torch.ones(3).bfloat16())
    assert found.summary == "1 equal (1 in another dtype), 0 differ, 0 only in A, 0 only in B"


def test_a_checkpoint_with_nan_equals_itself(tmp_path):
    value = torch.tensor([1.0, float("nan"), float("inf")])
    assert "the same, bit for bit" in compared(tmp_path, value, value.clone()).summary


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ([0.0, 1.0], [-0.0, 1.0], "the signs of zeros, or the bits of NaN"),
        ([1.0, float("nan")], [3.0, float("nan")], "values, by up to 2"),
        ([2**60, 1], [2**60 + 1, 1], "values, by up to 1"),
    ],
)
def test_a_small_difference_is_found_and_described(tmp_path, first, second, what):
    (found,) = compared(tmp_path, torch.tensor(first), torch.tensor(second)).differences
    assert found.what == what
