"""Names of files, classes, functions, arguments, layers and errors in the documentation exist in the code."""

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from headwater.core import errors

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headwater"
PAGES = ["architecture", "gradients", "vocabulary"]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@cache
def members() -> dict[str, set[str]]:
    """Return the names that each class of the engine defines: methods, attributes, and those of its bases."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for folder in ("core", "plan", "store", "stream", "profiler", "fabric", "api", "trainer"):
        for file in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(_defined(node))
                    bases[node.name] = [ast.unparse(base) for base in node.bases]
    for name in reversed(list(found)):
        for base in bases[name]:
            found[name] |= found.get(base, set())
    return found


def _defined(node: ast.ClassDef) -> set[str]:
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    assigned = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return methods | fields | assigned


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("name", PAGES)
def test_files_and_members_that_a_page_names_exist(name):
    for word in quoted(page(name)):
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
        elif re.fullmatch(r"(?:[a-z_]+/)+[a-z_]+\.py", word):
            assert (SOURCE / word).is_file(), word
        elif match := re.fullmatch(r"([A-Z][A-Za-z]+)\.([a-z_]+)", word):
            known = members().get(match[1])
            assert match[1] == "Tensor" or (known and match[2] in known), word
        elif re.fullmatch(r"[A-Z][a-z]+[A-Z][A-Za-z]+", word):
            assert word in members() or hasattr(errors, word), word


def test_layers_of_the_page_are_those_of_the_import_linter():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"headwater\.(\w+)", layer) for layer in contracts[0]["layers"]]
    table = re.findall(r"^\| ((?:`\w+`,? ?)+) \|", page("architecture"), re.MULTILINE)
    found = [name for row in table for name in re.findall(r"`(\w+)`", row)]
    assert sorted(found) == sorted(name for layer in layers for name in layer)
    depth = {name: number for number, layer in enumerate(layers) for name in layer}
    assert [depth[name] for name in found] == sorted(depth[name] for name in found)


def library_rows() -> list[tuple[str, list[str]]]:
    """Return the functions and classes of the reference, each with the arguments that its row shows."""
    rows = []
    for row in re.findall(r"^\| (`.*?) \|", page("reference").split("## Library")[1], re.MULTILINE):
        module = ""
        for call in re.findall(r"`([^`]+)`", row):
            name, _, arguments = call.partition("(")
            name = f"{module}.{name}" if "." not in name and module else name
            module = name.rpartition(".")[0]
            words = [each.strip().partition("=")[0] for each in arguments.rstrip(")").split(",")]
            rows.append((name, [each for each in words if each.isidentifier() or each == "…"]))
    return rows


@pytest.mark.parametrize(("name", "arguments"), library_rows(), ids=lambda each: each if each else "")
def test_functions_of_the_reference_take_the_arguments_that_it_shows(name, arguments):
    module, _, attribute = name.rpartition(".")
    owner = importlib.import_module("headwater.stream.engine").Engine if module == "Engine" else None
    found = getattr(owner or importlib.import_module(f"headwater.{module}"), attribute)
    if arguments:
        known = inspect.signature(found).parameters.values()
        required = {each.name for each in known if each.default is each.empty and each.name != "self"}
        assert "…" in arguments or required <= set(arguments), required
        shown = [each for each in arguments if each != "…"]
        assert [each.name for each in known if each.name in shown] == shown


def test_every_error_is_in_the_reference():
    section = page("reference").split("## Errors")[1].split("\n## ")[0]
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    expected = {each.__name__ for each in classes if each is not errors.HeadwaterError}
    assert set(re.findall(r"^\| `(\w+Error)`", section, re.MULTILINE)) == expected
