"""Commands that compile or validate instead of training, and training of models that no graph can hold."""

import copy

import pytest
import torch
import yaml
from capture_models import WIDTH, Odd

from headwater.api.compile import compile, release
from headwater.api.without_training import compile_only
from headwater.cli.main import main
from headwater.run import main as run_main


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_fit_can_compile_instead_of_training(tmp_path, capsys):
    assert main(["fit", "gpt/tiny", "--model_dir", "run", "--compile_only"]) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"compile"}
    assert (tmp_path / "run" / "compile" / "graphs" / "blocks.0.py").is_file()
    out = capsys.readouterr().out
    assert "_LinearCrossEntropy: a custom autograd function" in out
    assert max(map(len, out.splitlines())) <= 80


def test_fit_can_validate_instead_of_training(tmp_path, capsys):
    assert main(["fit", "gpt/tiny", "--validate_only"]) == 0
    assert capsys.readouterr().out.startswith("valid: model, loss and batch fit together\n")
    assert not list(tmp_path.iterdir())


def test_compile_only_in_params_uses_the_named_folder(tmp_path):
    assert main(["fit", "gpt/tiny", "trainer.init.backend.compile_only=true", "--compile_dir", "there"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"there"}


def test_a_compile_dir_that_cannot_be_used_is_refused_and_unchanged(tmp_path, capsys):
    (tmp_path / "file").touch()
    other = tmp_path / "other" / "operators.json"
    for content in ('{"x": 1}', "{", '{"graphs": [1]}'):
        other.parent.mkdir(exist_ok=True)
        other.write_text(content)
        assert main(["fit", "gpt/tiny", "--compile_only", "--compile_dir", "other"]) == 2
        assert "not written by a compilation" in capsys.readouterr().err
        assert other.read_text() == content
    assert main(["fit", "gpt/tiny", "--compile_only", "--compile_dir", "file"]) == 2
    assert "expected a folder or nothing, found a file" in capsys.readouterr().err
    assert main(["fit", "gpt/tiny", "--compile_only", "--compile_dir", "/proc/none"]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_compile_only_works_in_params_of_the_older_form(tmp_path, capsys):
    older = {
        "train_input": {"data_processor": "GptHDF5DataProcessor", "data_dir": "none", "batch_size": 2},
        "model": {
            "name": "gpt2", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2,
            "max_position_embeddings": 8, "filter_size": 32,
        },
        "optimizer": {"optimizer_type": "AdamW", "learning_rate": 0.01},
        "runconfig": {"max_steps": 2, "validate_only": True},
    }  # fmt: skip
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(older))
    assert run_main(["--params", "params.yaml", "--mode", "train"]) == 0
    assert "batch: int64[2, 8], int64[2, 8], int64[2, 8]" in capsys.readouterr().out


def losses(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_model_that_no_graph_can_hold_still_trains(tmp_path):
    torch.manual_seed(0)
    model = Odd()
    plain = copy.deepcopy(model)
    report = compile_only(model, torch.zeros(4, WIDTH), compile_dir=tmp_path)
    assert any(not finding.captured for finding in report.captured.findings)
    compile(model, "CSX")
    try:
        assert losses(model) == losses(plain)
    finally:
        release(model)
