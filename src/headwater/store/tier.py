"""What a tier of the weight store is."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from headwater.core.errors import StoreError
from headwater.store.layout import Group, StageLayout

WHOLE = slice(0, None)
"""All bytes of a wire image."""


class Tier(abc.ABC):
    """Keeps the bytes of every stage. One thread at a time works on a stage; the store sees to that.

    Attributes:
        is_shared: whether every rank of the host reaches all bytes and changes its share of each stage;
            otherwise one rank changes what the host has of a stage.
        is_here: whether this rank reaches them.
        writes_behind: whether other ranks read what was written only after `settle`.
    """

    is_shared = False
    is_here = True
    writes_behind = True

    def __init__(self, layouts: Sequence[StageLayout]) -> None:
        self.layouts = layouts

    @abc.abstractmethod
    def resident_wire(self, stage: int) -> torch.Tensor | None:
        """The wire image where it lies in host memory; `None` if it has to be read."""

    @contextmanager
    def wire(
        self, stage: int, buffer: torch.Tensor | None = None, *, write: bool, part: slice = WHOLE
    ) -> Iterator[torch.Tensor]:
        """The wire image of a stage as host memory, for as long as the context is open.

        Args:
            stage: which stage.
            buffer: page-aligned host memory to read it into, where it has to be read.
            write: whether it is changed and must be put back.
            part: the bytes that are wanted, and changed.
        """
        resident = self.resident_wire(stage)
        if resident is not None:
            yield resident
            return
        assert buffer is not None, "this tier needs a buffer for the wire image"
        image = buffer[: self.layouts[stage].wire_bytes]
        self.read_wire(stage, image, part)
        yield image
        if write:
            self.write_wire(stage, image, part)

    @abc.abstractmethod
    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        """Copy a part of the wire image, or a little more of it, to its place in page-aligned host memory."""

    @abc.abstractmethod
    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        """Replace a part of the wire image, or as much as `read_wire` gives, by what is there in `image`."""

    @abc.abstractmethod
    def groups(
        self, stage: int, groups: Sequence[Group], *, read: bool = True, write: bool
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        """Each of these groups with its bytes, which stay valid until the next one is asked for.

        Args:
            stage: which stage.
            groups: of those that this host keeps.
            read: whether the bytes are wanted, or will be written whole.
            write: whether the bytes are changed and must be put back.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until everything that was written is where it belongs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory, threads and files."""


class ElsewhereTier(Tier):
    """What other ranks of the host keep, as one sees it that neither reads nor updates it."""

    is_here = False

    def resident_wire(self, stage: int) -> None:
        return None

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        raise StoreError(
            f"stage {self.layouts[stage].stage.name!r} is read by a rank that does not have it",
            remedy="let the first rank of the host read weights that are on disk",
        )

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        pass

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: bool = True, write: bool
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        return iter(())

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass
