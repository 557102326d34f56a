"""The tables of the page on models are up to date."""

import collections
import re
import textwrap
from pathlib import Path

import pytest

from headwater.config import load_params, shipped_params
from headwater.config.models import MODELS
from headwater.convert.formats import CONVERTERS, FORMATS
from headwater.trainer.zoo_job import meta_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def code(classes):
    """A class in the font of code, or two classes with `and` between them."""
    return " and ".join(f"`{name}`" for name in classes.split(" and "))


def models_table():
    """A row for each name of a model: the schema of its section, and how transformers calls it."""
    yield "| `name` | keys of the model section | class of the transformers library |"
    yield "|---|---|---|"
    for name, schema in MODELS.items():
        classes = [code(format.architecture) for format in FORMATS if name in format.models]
        classes = ["any"] if name == "hf" else classes
        yield f"| `{name}` | `{schema.__name__}` | {', '.join(classes) or '–'} |"


def converters_table():
    """A row for each name that a converter has."""
    yield "| `--model` | class of the transformers library | model here |"
    yield "|---|---|---|"
    for name, (format, model) in CONVERTERS.items():
        if name.endswith("-headless"):
            continue
        yield f"| `{name}` | {code(format.architecture)} | `{model}` |"


def parameters(path):
    """Parameters of the model of a params file."""
    return sum(value.numel() for value in meta_model(load_params(path).init.model).parameters())


def rounded(number):
    """A number to three digits, in thousands (K), millions (M) or billions (B)."""
    for exponent, unit in ((9, "B"), (6, "M"), (3, "K")):
        if round(number) >= 10**exponent:
            return f"{number / 10**exponent:#.3g}".rstrip(".") + unit
    return str(number)


def sources(path):
    """Papers that a params file names."""
    return re.findall(r"arXiv:\d+\.\d+|Science [\d:]+\d", path.read_text())


def params_list():
    """An entry for each folder of params files: their names by size, and the papers that they name."""
    folders = collections.defaultdict(dict)
    for name, path in shipped_params().items():
        folder, _, file = name.partition("/")
        folders[folder][file] = (parameters(path), path)
    for folder, files in folders.items():
        in_order = sorted(files.items(), key=lambda item: item[1][0])
        names = ", ".join(f"`{file}` ({rounded(count)})" for file, (count, _) in in_order)
        papers = list(dict.fromkeys(paper for _, (_, path) in in_order for paper in sources(path)))
        entry = f"- **`{folder}`**: {names}."
        if papers:
            entry += f" {'Paper' if len(papers) == 1 else 'Papers'}: {', '.join(papers)}."
        yield from textwrap.wrap(entry, 120, subsequent_indent="  ", break_on_hyphens=False)


@pytest.mark.parametrize("table", [models_table, converters_table, params_list])
def test_tables_and_lists_are_up_to_date(table):
    expected = "\n".join(table())
    assert expected in PAGE.read_text(), f"docs/models.md should have these lines:\n{expected}"
