"""Two small random models in folders of the transformers library, and a server with both."""

import pytest
import torch
from serving_samples import GPT2, LLAMA, ServerProcess, save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A GPT-2 of 96 positions and a Llama of 32,768."""
    folder = tmp_path_factory.mktemp("served")
    long = save_model(folder / "long", LLAMA, ends=False)
    return {"small": save_model(folder / "small", GPT2), "long": long}


@pytest.fixture(scope="session")
def server(folders):
    """A server with the two models."""
    with ServerProcess(*(f"{name}={folder}" for name, folder in folders.items())) as process:
        yield process


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
