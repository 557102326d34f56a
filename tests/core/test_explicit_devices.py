"""Code of the engine names the device of each new tensor, because a user may have set a default device."""

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import headwater

FOLDERS = (
    *("api", "core", "fabric", "framework", "integrations", "optim", "plan"),
    *("profiler", "sparsity", "store", "stream", "trainer", "utils"),
)
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def is_without_device(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in CONSTRUCTORS
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    )


def test_each_new_tensor_has_a_device():
    root = Path(headwater.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and is_without_device(node)
    ]
    assert found == []
