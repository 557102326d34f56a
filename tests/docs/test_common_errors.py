"""The messages on the page of common errors are those of the code."""

import re
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
