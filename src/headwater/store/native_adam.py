"""The native kernel of Adam and AdamW (`headwater/native/adam.c`), and the data that it is called with."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

from headwater.store.layout import Encoding
from headwater.store.rounding import TABLE_ELEMENTS, random_numbers

ENCODINGS = {Encoding.SAME: 0, Encoding.SPLIT: 1, Encoding.EVEN: 2}
"""Way to store a master -> its number in the kernel."""


class AdamSettings(ctypes.Structure):
    """The options of Adam for some parameters. `step` counts from 1."""

    _fields_ = (
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("step", ctypes.c_double),
        ("decoupled", ctypes.c_int32),
        ("maximize", ctypes.c_int32),
    )


class AdamPiece(ctypes.Structure):
    """A piece of a parameter: addresses of its first elements, and how they are stored.

    Attributes:
        wire: wire values.
        master: lower halves of the masters; 0 if the wire image is the master.
        ties: the bits of `Encoding.EVEN`; 0 for another encoding.
        gradient: fp32 or bf16.
        mean: first moments, fp32 or bf16.
        square: second moments, fp32 or bf16.
        numel: number of elements.
        mean_place: place of the first element of `mean` in the table of random numbers.
        square_place: the same for `square`.
        settings: index of its settings.
        encoding: see `ENCODINGS`.
        bf16_gradient: true if the gradient is bf16.
        bf16_state: true if the moments are bf16.
        is_first: true before the first update, when the moments have no values.
        factor: the gradient is multiplied by this.
        limit: the gradient's elements are then clipped to ± this.
    """

    _fields_ = (
        ("wire", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("square", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("mean_place", ctypes.c_int64),
        ("square_place", ctypes.c_int64),
        ("settings", ctypes.c_int32),
        ("encoding", ctypes.c_int32),
        ("bf16_gradient", ctypes.c_int32),
        ("bf16_state", ctypes.c_int32),
        ("is_first", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class _Noise(ctypes.Structure):
    _fields_ = (("table", ctypes.c_void_p), ("length", ctypes.c_int64))


@final
class AdamKernel:
    """Adam and AdamW in one pass over pieces in host memory.

    Args:
        library: the compiled source.
        width: elements of a vector of torch's kernel. torch computes the elements of a piece after the last
            whole vector in another way.
    """

    def __init__(self, library: ctypes.CDLL, width: int) -> None:
        self._function = library.headwater_adam
        self._function.restype = None
        self._width = ctypes.c_int64(width)
        self._random = random_numbers()
        self._noise = _Noise(self._random.data_ptr(), TABLE_ELEMENTS)

    def run(self, pieces: Sequence[AdamPiece], settings: Sequence[AdamSettings]) -> None:
        """Update pieces on all cores that torch uses in the calling thread.

        Other threads run Python meanwhile: ctypes releases the interpreter's lock during the call. The kernel
        allocates nothing and cannot fail, so either all pieces are updated or none.
        """
        listed = (AdamPiece * len(pieces))(*pieces)
        known = (AdamSettings * len(settings))(*settings)
        count = ctypes.c_int64(len(pieces))
        self._function(listed, count, known, ctypes.byref(self._noise), self._width)
