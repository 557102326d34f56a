"""The page on models says what there is."""

from pathlib import Path

import pytest

from headwater.config.models import MODELS
from headwater.convert.formats import CONVERTERS, FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def models_table():
    """A row for each name of a model: the schema of its section, and how transformers calls it."""
    yield "| `name` | keys of the model section | class of the transformers library |"
    yield "|---|---|---|"
    for name, schema in MODELS.items():
        classes = [f"`{format.architecture}`" for format in FORMATS if name in format.models]
        yield f"| `{name}` | `{schema.__name__}` | {', '.join(classes) or '–'} |"


def converters_table():
    """A row for each name that a converter has."""
    yield "| `--model` | class of the transformers library | model here |"
    yield "|---|---|---|"
    for name, (format, model) in CONVERTERS.items():
        yield f"| `{name}` | `{format.architecture}` | `{model}` |"


@pytest.mark.parametrize("table", [models_table, converters_table])
def test_tables_are_up_to_date(table):
    expected = "\n".join(table())
    assert expected in PAGE.read_text(), f"docs/models.md should have this table:\n{expected}"
