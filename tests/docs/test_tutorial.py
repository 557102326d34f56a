"""The tutorial's diffs apply, and every version of its script prints the same losses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def versions(folder: Path) -> list[str]:
    """The script of the tutorial, and after each diff."""
    text = (DOCS / "own_loop.md").read_text()
    script = folder / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    found = [script.read_text()]
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        subprocess.run(["git", "apply", "-p0", "-"], cwd=folder, input=diff, text=True, check=True)
        found.append(script.read_text())
    return found


def losses(script: str, folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_version_prints_the_same_losses(tmp_path):
    plain, *streamed = versions(tmp_path)
    assert len(streamed) == 3
    expected = losses(plain, tmp_path / "0")
    assert [line.split()[0] for line in expected] == ["5", "10", "15", "20"]
    for number, script in enumerate(streamed, 1):
        assert losses(script, tmp_path / str(number)) == expected, number
    assert sorted(path.name for path in (tmp_path / "3").glob("*.mdl")) == [
        "checkpoint_10.mdl",
        "checkpoint_20.mdl",
    ]


def test_the_script_of_the_readme(tmp_path):
    text = (DOCS.parent / "README.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert len(script.splitlines()) <= 40
    assert "device=backend.torch_device" in script, "with a GPU, the model computes there"
    lines = losses(script, tmp_path / "readme")
    values = [float(line.split()[-1]) for line in lines]
    assert values[-1] < 0.9 * values[0]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the titles of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["../README.md", *(path.name for path in sorted(DOCS.glob("*.md")))])
def test_links_lead_to_files_and_titles(name):
    page = (DOCS / name).resolve()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
