"""Every module of the package can be imported, whatever optional packages are installed."""

import importlib
from pathlib import Path

import pytest

import headwater
from headwater.core.errors import ConfigError

OPTIONAL = {
    "accelerate", "diffusers", "h5py", "jinja2", "lightning", "matplotlib", "PIL", "pyarrow", "ray",
    "tensorboard", "tokenizers", "torchmetrics", "transformers",
}  # fmt: skip
"""Packages that an extra installs."""
SOURCE = Path(headwater.__file__).parent
FILES = [file.relative_to(SOURCE.parent) for file in sorted(SOURCE.rglob("*.py"))]
MODULES = [
    ".".join(file.with_suffix("").parts) for file in FILES if file.stem not in ("__init__", "__main__")
]


def missing(error):
    """Return the name of the missing optional package that made a module raise `error`."""
    cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    name = str(cause.name).partition(".")[0] if isinstance(cause, ModuleNotFoundError) else None
    return name if name in OPTIONAL else None


@pytest.mark.parametrize("name", MODULES)
def test_import(name):
    try:
        importlib.import_module(name)
    except (ModuleNotFoundError, ConfigError) as error:
        if missing(error) is None:
            raise
        pytest.skip(f"needs {missing(error)}")
