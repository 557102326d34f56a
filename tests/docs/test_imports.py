"""Every module of the package can be imported, whatever optional packages are installed."""

import importlib
import pkgutil

import pytest

import headwater

OPTIONAL = {
    "accelerate", "diffusers", "h5py", "jinja2", "lightning", "matplotlib", "PIL", "pyarrow", "ray",
    "tensorboard", "tokenizers", "torchmetrics", "transformers",
}  # fmt: skip
"""Packages that an extra installs."""
MODULES = [module.name for module in pkgutil.walk_packages(headwater.__path__, "headwater.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_import(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
