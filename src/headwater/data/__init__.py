"""Input pipelines: preparation of HDF5 files from texts and records, and batches from these files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.data.conversion import convert_dataset_to_HDF5

__all__ = ["convert_dataset_to_HDF5"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because most data sets do not need h5py."""
    if name in __all__:
        from headwater.data import conversion

        return getattr(conversion, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
