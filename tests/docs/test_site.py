"""The documentation is built as a site without warnings, and reads nothing from a network."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the build takes half a minute of processor time

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load(path):
    """Return the module of a file in the documentation."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", DOCS, folder]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_without_warnings(site):
    names = {page.stem for page in DOCS.glob("*.md")}
    assert names <= {page.stem for page in site.glob("*.html")}
    assert "Fine-tune a model larger than memory" in (site / "index.html").read_text()


def test_no_page_loads_a_file_from_a_network(site):
    loads = re.compile(r"""(?:<script[^>]*\ssrc|<img[^>]*\ssrc|<link[^>]*\shref)=["']?(?://|https?:)""")
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s+)[\"']?(?://|https?:)", style.read_text()), style


def test_search_finds_a_word_without_a_network(site):
    index = (site / "searchindex.js").read_text()
    assert '"beladi":' in index and "quickstart" in index  # the index has stems of words


def test_python_reference_has_every_public_name(site):
    import headwater

    page = (site / "python_reference.html").read_text()
    modules = {"amp", "distributed", "integrations", "metrics", "optim", "sparse", "utils"}
    older = {"__version__", "experimental", "framework", "compile_step"}
    for name in set(headwater.__all__) - modules - older:
        assert f">{name}</span>" in page, name


@pytest.mark.parametrize("name", ["all_commands.md", "all_errors.md", "all_keys.md"])
def test_pages_made_from_the_code_are_up_to_date(name):
    expected = load(DOCS / "made_from_code.py").pages()[name]
    assert (DOCS / name).read_text() == expected, "run python docs/made_from_code.py"


@pytest.mark.parametrize("name", ["all_commands.md", "all_errors.md", "all_keys.md"])
def test_every_option_error_and_key_has_a_meaning(name):
    rows = load(DOCS / "made_from_code.py").pages()[name].splitlines()
    assert not [row for row in rows if row.endswith("|  |")]


@pytest.mark.parametrize("name", ["flow.svg", "peers.svg"])
def test_pictures_are_those_of_the_script(name):
    expected = load(DOCS / "pictures" / "draw.py").pictures()[name]
    assert (DOCS / "pictures" / name).read_text() == expected, "run python docs/pictures/draw.py"


def rows_of_benchmark(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]["rows"]


@pytest.mark.parametrize("name", ["hardware", "hardware_cards"])
def test_the_tables_of_machines_are_those_of_the_benchmark(name):
    page = (DOCS / "hardware.md").read_text()
    for row in rows_of_benchmark(name):
        assert "| " + " | ".join(row.values()) + " |" in page


def test_the_predicted_steps_of_an_h200_are_those_of_the_benchmark():
    page = (DOCS / "hardware.md").read_text()
    columns = ["step_s", "on device", "micro-batch", "compute s", "update s", "update on device s", "link s"]
    for row in rows_of_benchmark("hardware_h200"):
        if row["plan"] == "one micro-batch":  # the best plan has one micro-batch
            continue
        cells = [str(row.get(name, "–")) for name in [*columns, "device GiB", "host GiB"]]
        assert f"| {' | '.join(cells)} |" in page, row["plan"]


def test_code_in_docstrings_becomes_literal():
    convert = load(DOCS / "docstrings.py").to_restructured_text
    assert convert(["Return `x`.", "", "    code", "", "Args:", "    a: `b`."]) == [
        "Return ``x``.", "", "::", "", "    code", "", "Args:", "    a: ``b``.",
    ]  # fmt: skip
