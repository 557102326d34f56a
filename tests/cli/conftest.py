"""Small data, and the command line in this process."""

import re

import pytest
from run_samples import write_params

from book_samples import book_samples
from headwater.cli.main import main


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Samples of 16 tokens from a vocabulary of 300."""
    return book_samples(tmp_path_factory.mktemp("data"), val_fraction=0.1)


@pytest.fixture
def params(tmp_path, data):
    """A params file; the run works in the folder `run` beside it."""
    return write_params(tmp_path, data)


_OF_A_BUSY_MACHINE = re.compile(
    r"of its cores while the rates of the machine were measured| so far\)$"
    r"|the speed of this machine was not measured"
)


def _quiet(line):
    """Return a line of stderr, or nothing for the notices that depend on how busy the machine is."""
    return "" if _OF_A_BUSY_MACHINE.search(line) else line


@pytest.fixture
def headwater(capsys):
    """Runs a command line in this process: exit code, stdout and stderr."""

    def run(*words):
        code = main([str(word) for word in words])
        output = capsys.readouterr()
        return code, output.out, "".join(map(_quiet, output.err.splitlines(keepends=True)))

    return run


@pytest.fixture(scope="session")
def two(tmp_path_factory, data):
    """The model_dir of an undisturbed run on two ranks of this machine."""
    folder = tmp_path_factory.mktemp("two")
    assert main(["fit", str(write_params(folder, data)), "--num_csx=2"]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def alone(tmp_path_factory, data):
    """The same with a thread each, as ranks of several hosts have them."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(["fit", str(write_params(folder, data)), "--num_csx=2"]) == 0
    return folder / "run"
