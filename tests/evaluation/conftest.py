"""A small random model in three forms (run, folder of transformers, the harness's own), and local tasks."""

import sys

import pytest
import torch
import yaml
from evaluation_samples import BENCHMARKS, MODEL, PARAMS, TASK_FILES, TEXT, save_tokenizer

from headwater.cli.main import main
from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf
from headwater.core.side_files import copy_side_files
from headwater.models.decoder import Decoder


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """A random GPT-2 in a folder of the transformers library, with its tokenizer."""
    folder = tmp_path_factory.mktemp("library")
    tokenizer = save_tokenizer(folder / "tokenizer")
    config = DecoderConfig.model_validate({**MODEL, "vocab_size": tokenizer.get_vocab_size()})
    export_hf(Decoder(config, seed=5).state_dict(), config, folder / "model")
    copy_side_files(folder / "tokenizer", folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def trained(library, tmp_path_factory):
    """The model_dir of a run that begins with the same weights, for a model of ours."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["checkpoint", "import", str(library), "--model_dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A folder with the task files of these tests, which name the data of this machine."""
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmark data are not there")
    folder = tmp_path_factory.mktemp("tasks")
    for file in TASK_FILES.glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace("BENCHMARKS", str(BENCHMARKS)))
    return folder


@pytest.fixture
def run(tmp_path):
    """Trains a small model with callbacks on a text, four steps by default; returns the folder of the run."""
    from headwater.data.prepare import prepare
    from headwater.data.settings import PrepareSettings
    from headwater.data.tokenizer import TrainBPE

    def train(name, callbacks, text=TEXT * 4, **loop):
        data = tmp_path / f"data-{hash(text)}"
        if not data.exists():
            (tmp_path / "text.txt").write_text(text)
            prepare([tmp_path / "text.txt"], data, PrepareSettings(TrainBPE(300), 64))
        tree = yaml.safe_load(PARAMS)
        tree["trainer"]["init"] |= {"callbacks": callbacks, "model_dir": str(tmp_path / name)}
        tree["trainer"]["init"]["loop"] |= loop
        tree["trainer"]["fit"]["train_dataloader"]["data_dir"] = str(data / "train")
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        assert main(["fit", str(tmp_path / f"{name}.yaml")]) == 0
        return tmp_path / name

    return train


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Work without a network, also if another test has imported the libraries, which read this once."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
