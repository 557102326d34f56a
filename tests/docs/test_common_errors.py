"""The messages on the page of common errors are those of the code."""

import re
import tomllib
from pathlib import Path

import pytest

from headwater.core import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "common_errors.md").read_text()
JOINED = re.compile(r"""["']\s*\n\s*f?["']""")
SOURCE = "\n".join(JOINED.sub("", file.read_text()) for file in (ROOT / "src" / "headwater").rglob("*.py"))
MESSAGES = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)


def test_the_page_has_messages():
    assert len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_message_of_the_page_is_in_the_code(message):
    for part in message.split("…"):
        assert part.strip() in SOURCE, part


def test_classes_of_the_page_exist():
    named = set(re.findall(r"`(\w+Error)`", PAGE))
    assert named and all(hasattr(errors, name) for name in named)


def test_the_page_names_every_extra_that_an_error_asks_for():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (paragraph,) = re.findall(r"The extras are (.+?)\.\n", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", paragraph))
    of_developers = {"docs", "test", "dev"}
    assert named == declared.keys() - of_developers
    assert set(re.findall(r"headwater\[(\w+)\]", SOURCE)) <= named
