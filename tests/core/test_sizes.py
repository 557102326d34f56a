"""Classes and functions stay small: a class where everything meets is divided before it grows."""

import ast
from pathlib import Path

import pytest

import headwater

METHODS, ATTRIBUTES, LINES, PARAMETERS = 20, 15, 60, 8

AS_DOCUMENTED = {
    "generate",
    "compile_only",
    "convert_dataset_to_HDF5",
    "SelfAttention.__init__",
    "MixtureOfExperts.__init__",
    "_LinearCrossEntropy.forward",
}
"""Functions of the specification, layers with a parameter for each key, a function of autograd, and
`generate`, whose options have the names of the transformers library."""

FILES = sorted(Path(headwater.__file__).parent.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def attributes(cls):
    """Return the names that the methods of a class assign to `self`."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def lines(function):
    """Return the number of lines of a function, without its docstring."""
    count = function.end_lineno - function.lineno + 1
    text = function.body[0]
    return count - (text.end_lineno - text.lineno + 1) * (ast.get_docstring(function) is not None)


def parameters(function):
    """Return the number of parameters of a function, without `self`."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(function.args.kwonlyargs)


def findings(tree):
    """Yield a sentence for each class and function of a module that is too large."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
            for method in methods:
                method.name = f"{node.name}.{method.name}"
            if len(methods) > METHODS:
                yield f"{node.name} has {len(methods)} methods"
            if len(attributes(node)) > ATTRIBUTES:
                yield f"{node.name} has {len(attributes(node))} attributes"
        elif isinstance(node, FUNCTIONS):
            if lines(node) > LINES:
                yield f"{node.name} has {lines(node)} lines"
            if parameters(node) > PARAMETERS and node.name not in AS_DOCUMENTED:
                yield f"{node.name} has {parameters(node)} parameters"


def test_classes_and_functions_are_small():
    found = {str(path): list(findings(ast.parse(path.read_text()))) for path in FILES}
    assert {path: sentences for path, sentences in found.items() if sentences} == {}


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("class A:\n" + "".join(f"    def f{n}(self): pass\n" for n in range(21)), "A has 21 methods"),
        (
            "class A:\n    def f(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(16)),
            "A has 16 attributes",
        ),
        ("def f():\n" + "    pass\n" * 60, "f has 61 lines"),
        ("def f(a, b, c, d, e, g, h, *, i, j): pass", "f has 9 parameters"),
    ],
)
def test_too_large_functions_and_classes_are_found(code, finding):
    assert list(findings(ast.parse(code))) == [finding]
