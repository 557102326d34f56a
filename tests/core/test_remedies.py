"""Every error that a user can cause says what to do."""

import ast
from pathlib import Path

import headwater
from headwater.core import errors
from headwater.core.errors import HeadwaterError

PACKAGE = Path(headwater.__file__).parent
CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HeadwaterError)
}
NOT_FOR_USERS = (
    "appliance/remote/",  # damaged messages between two hosts
    "appliance/requests.py",
    "appliance/types.py",
    "board/board.py",  # answers to a browser that asks for something that is gone
    "core/native.py",  # one line in the log: the run continues without the kernel
)


def without_remedy(source):
    """Yield the lines in which an error is made without a remedy."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
            keywords = {keyword.arg for keyword in node.keywords}
            if not keywords & {"remedy", None}:  # `None`: a dictionary of keywords
                yield node.lineno


def test_an_error_without_a_remedy_is_found():
    assert [*without_remedy('raise ConfigError("what")\nraise ConfigError("what", remedy="do this")')] == [1]


def test_every_error_for_users_has_a_remedy():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if lines := [] if name.startswith(NOT_FOR_USERS) else [*without_remedy(path.read_text())]:
            found[name] = lines
    assert found == {}
