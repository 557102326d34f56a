"""The commands of README and quickstart run in order.

The default suite trains a tenth of the steps; `scripts/real_data` runs the commands as written.
"""

import gzip
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.data.assets import sample_text

ROOT = Path(__file__).resolve().parents[2]
SET_UP = ("pip install", "scripts/")
"""What a user types once, before the commands; the environment of the tests has done it."""


def commands(page):
    """The command lines of the page, without those that set the environment up."""
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        for line in block.splitlines():
            if not line.startswith(SET_UP):
                yield line


def params(page):
    """The params file that the page shows."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a text of a quarter of a megabyte."""
    (tmp_path / "book.txt").write_bytes(gzip.decompress(sample_text().read_bytes())[:250_000])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_fewer_steps(line):
    """The command with a tenth of the steps that it trains."""
    return re.sub(r"(?<=--max_steps )\d+", lambda steps: str(int(steps[0]) // 10), line)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.parametrize(
    "typed", [with_fewer_steps, pytest.param(str, marks=(pytest.mark.slow, pytest.mark.real_data))]
)
def test_every_command_of_the_page_runs(page, typed, folder):
    (folder / "book.yaml").write_text(params(page))
    lines = list(commands(page))
    assert {"data", "plan", "fit", "generate", "checkpoint"} <= {shlex.split(line)[1] for line in lines}
    for line in lines:
        name, *words = shlex.split(typed(line), comments=True)
        assert name == "headwater", line
        # A process for each command: a plan counts what its process holds already.
        done = subprocess.run([sys.executable, "-m", "headwater", *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (folder / "book-hf/model.safetensors").is_file() and (folder / "book-hf/tokenizer.json").is_file()
