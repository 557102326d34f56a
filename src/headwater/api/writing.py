"""Writing of tensors to safetensors files. Those in a weight store are read stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwater.core.checked_files import CHUNK_BYTES
from headwater.core.lazy import Cutter, StoredTensor, pieces_of
from headwater.core.safetensors import TensorFileWriter

if TYPE_CHECKING:
    from headwater.store.parameters import Parameters, StoredName
    from headwater.stream.home import Home


@runtime_checkable
class StoredValues(Protocol):
    """Interface: the `read_pieces` of a stored tensor whose values may be in a weight store."""

    @property
    def place(self) -> tuple[Home, str | None] | None:
        """The place of the parameter, and the name of the state if it is one; `None` outside of a store."""
        ...


def write_tensors(tensors: Mapping[str, Tensor], files: Mapping[str, TensorFileWriter]) -> None:
    """Write tensors to files, converted to the dtypes there.

    The tensors of a stage are read from the store together, in one pass that reads ahead. They are in memory
    in pieces only.

    Args:
        tensors: the tensors, by their names in the files.
        files: the open file of each tensor, by name.

    Raises:
        StoreError: if this rank does not have all values of a tensor, or a file cannot be written.
    """
    stages: dict[tuple[int, int], tuple[Parameters, dict[StoredName, list[str]]]] = {}
    for name, tensor in tensors.items():
        place = _place(tensor)
        if place is None:
            files[name].write_pieces(name, pieces_of(tensor))
        else:
            home, state = place
            _, stored = stages.setdefault((id(home.store), home.stage), (home.store.parameters, {}))
            stored.setdefault((home.index, state), []).append(name)
    for (_, stage), (parameters, stored) in stages.items():
        _write_stage(parameters, stage, stored, files)


def _place(tensor: Tensor) -> tuple[Home, str | None] | None:
    read = tensor.read_pieces if isinstance(tensor, StoredTensor) else None
    return read.place if isinstance(read, StoredValues) else None


def _write_stage(
    parameters: Parameters,
    stage: int,
    stored: Mapping[StoredName, list[str]],
    files: Mapping[str, TensorFileWriter],
) -> None:
    cutters: dict[StoredName, Cutter] = {}
    written = dict.fromkeys(stored, 0)

    def write(tensor: StoredName, piece: Tensor) -> None:
        for name in stored[tensor]:
            files[name].write_converted(name, written[tensor], piece)
        written[tensor] += piece.numel()

    # Reading may apply an update. Its results must not be inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        for tensor, run in parameters.runs(stage, stored):
            # A file has a checksum per `CHUNK_BYTES`; pieces from the store may have other sizes.
            cutter = cutters.setdefault(tensor, Cutter(CHUNK_BYTES // run.dtype.itemsize))
            for piece in cutter.cut(run):
                write(tensor, piece)
        for tensor, cutter in cutters.items():
            for piece in cutter.rest():
                write(tensor, piece)
