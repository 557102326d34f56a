"""Depth of the package: the longest chain of modules in which each module imports the next."""

import ast
import functools
from pathlib import Path

import headwater

MOST_MODULES = 15
"""Lower it when the chain gets shorter. A split of a module in the chain must not make it longer."""

_SOURCES = Path(headwater.__file__).parent


def _name(path):
    parts = path.relative_to(_SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(body):
    """Yield the imports that run when a module is imported; those for type checkers do not."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            yield from () if "TYPE_CHECKING" in ast.unparse(node.test) else _imports(node.body)
            yield from _imports(node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from _imports(node.body)


def _imported(source, modules):
    """Return the modules among `modules` that a source imports."""
    found = set()
    for node in _imports(ast.parse(source).body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        else:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inner}
    return found & modules


def longest_chain():
    paths = {_name(path): path for path in _SOURCES.rglob("*.py")}
    imported = {name: _imported(path.read_text(), paths.keys()) - {name} for name, path in paths.items()}

    @functools.cache
    def chain(name):
        return (name, *max((chain(other) for other in sorted(imported[name])), key=len, default=()))

    return max((chain(name) for name in sorted(imported)), key=len)


def test_the_longest_chain_of_imports_does_not_grow():
    chain = longest_chain()
    assert len(chain) <= MOST_MODULES, " → ".join(chain)


def test_imports_for_type_checkers_and_in_functions_do_not_count():
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c\nfrom d import e\n"
    assert _imported(source, {"a", "b", "c", "d"}) == {"b", "d"}
    assert _imported(source, {"d", "d.e"}) == {"d.e"}
