"""`headwater conform` with processes: of a params file with its data, and of a Hugging Face folder."""

import shlex

import pytest
import yaml

from headwater.cli.main import main
from headwater.conform.child import PLAIN, Request
from headwater.conform.isolated import run_child
from headwater.conform.subject import load_subject
from headwater.core.errors import ConfigError


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(output):
    return [line.split(": ")[0].split() for line in output.splitlines() if ": " in line]


@pytest.mark.slow
def test_a_params_file_with_its_data_is_equal_in_processes(in_folder, capsys):
    words = " ".join(f"{a}{b}" for a in "bcdfghjklm" for b in ("an", "el", "on", "ur"))
    (in_folder / "book.txt").write_text("\n\n".join(words for _ in range(60)))
    assert main(shlex.split("data book.txt --vocab_size 300 --sequence_length 16 --out data/tiny")) == 0
    small = {
        "extends": "gpt/tiny",
        "trainer": {
            "init": {"model": {"vocab_size": 300, "hidden_size": 12, "num_hidden_layers": 1, "num_heads": 2}},
            "fit": {"train_dataloader": {"batch_size": 4}, "val_dataloader": {"batch_size": 4}},
            "validate": {"val_dataloader": {"batch_size": 4}},
        },
    }
    (in_folder / "small.yaml").write_text(yaml.safe_dump(small))
    capsys.readouterr()
    code = main(shlex.split("conform small.yaml --steps 2 --plans memory,ranks"))
    output = capsys.readouterr().out
    assert code == 0, output
    assert "model    small.yaml" in output
    assert ["memory", "equal"] in lines_of(output)
    assert ["ranks", "within", "tolerance"] in lines_of(output)


@pytest.mark.slow
def test_a_hugging_face_folder_is_equal_in_processes(in_folder, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    capsys.readouterr()
    code = main(shlex.split("conform llama --steps 1 --plans recompute"))
    output = capsys.readouterr().out
    assert code == 0, output
    assert ["recompute", "equal"] in lines_of(output)
    assert output.endswith("equal: 1 plan computes what plain PyTorch computes\n")


def test_a_config_that_transformers_cannot_use(in_folder):
    pytest.importorskip("transformers")
    (in_folder / "config.json").write_text('{"model_type": "no such type"}')
    with pytest.raises(ConfigError, match=r"cannot use this config.json: .*`no such type`"):
        load_subject(str(in_folder))


def test_a_run_does_not_see_the_state_of_an_earlier_run(in_folder):
    (in_folder / "counting.py").write_text(
        "import torch\n"
        "torch.calls = getattr(torch, 'calls', 0) + 1\n"
        "def make():\n"
        "    return torch.nn.Linear(4, torch.calls), [torch.ones(2, 4)]\n"
    )
    for number in range(2):
        request = Request(
            "counting:make", PLAIN, 1, 0, False, str(in_folder), str(in_folder / f"{number}.pt")
        )
        found = run_child(request, limit_s=200)
        assert found.status == "ok", found
        assert dict(found.shown)["initial value weight"].shape == (1, 4)
