"""The interface of tiers: the memory or the files in which a weight store keeps its stages."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from headwater.core.errors import StoreError
from headwater.store.layout import Group, StageLayout, outer_pages

if TYPE_CHECKING:
    from headwater.store.device import DeviceStage

WHOLE = slice(0, None)
"""All bytes of a wire image."""

Pages = Callable[[Group], Sequence[slice]]
"""Returns the bytes of a group that are needed: whole pages, in order."""


def all_pages(group: Group) -> Sequence[slice]:
    """Return all bytes of a group."""
    return [slice(0, group.num_bytes)]


def no_pages(group: Group) -> Sequence[slice]:
    """Return no bytes of a group."""
    return []


class Tier(abc.ABC):
    """Keeps the bytes of every stage. The store ensures that one thread at a time works on a stage.

    Attributes:
        layouts: one per stage.
        writes_behind: true if other ranks can read what was written only after `settle`.
        reads_pages: true if it can read and write any pages; otherwise only large blocks.
    """

    writes_behind = True
    reads_pages = True

    def __init__(self, layouts: Sequence[StageLayout]) -> None:
        self.layouts = layouts

    @abc.abstractmethod
    def is_here(self, stage: int) -> bool:
        """True if this rank can read and write the bytes of a stage."""

    @abc.abstractmethod
    def resident_wire(self, stage: int) -> torch.Tensor | None:
        """Return the wire image, valid after a fetch; `None` if the tier does not keep it in host memory."""

    @abc.abstractmethod
    def on_device(self, stage: int) -> DeviceStage | None:
        """Return a stage that is in device memory, where it is read and updated; otherwise `None`."""

    @contextmanager
    def wire(
        self,
        stage: int,
        buffer: torch.Tensor | None = None,
        *,
        write: bool,
        part: slice = WHOLE,
        overwrite: bool = False,
    ) -> Iterator[torch.Tensor]:
        """Yield the wire image of a stage in host memory. With `write`, store it when the context ends.

        Args:
            stage: the stage.
            buffer: page-aligned host memory for the image, if it has to be read.
            write: write it back at the end of the context, because it is changed.
            part: the bytes that are needed, and changed.
            overwrite: true if the caller writes all bytes of the part before it reads them. Their values are
                undefined then.
        """
        resident = self.resident_wire(stage)
        if resident is not None:
            yield resident
            return
        assert buffer is not None, "this tier needs a buffer for the wire image"
        image = buffer[: self.layouts[stage].wire_bytes]
        for needed in outer_pages(part) if overwrite and self.reads_pages else [part]:
            self.read_wire(stage, image, needed)
        yield image
        # This is not in a `finally`, because after an error the image may be half changed.
        if write:
            self.write_wire(stage, image, part)

    @abc.abstractmethod
    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        """Read the blocks of the wire image that contain `part`, into the same place of `into`.

        Args:
            stage: the stage.
            into: uint8 memory for the whole image.
            part: the bytes that are needed.
        """

    @abc.abstractmethod
    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        """Write the blocks of `image` that contain `part` to the stored wire image.

        Args:
            stage: the stage.
            image: uint8, the whole image.
            part: the bytes that have changed.
        """

    @abc.abstractmethod
    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        """Yield each of these groups with its bytes. The bytes are valid until the next group is yielded.

        Args:
            stage: the stage.
            groups: some of those that this host keeps.
            read: the bytes that are read; the others are undefined, so they must be overwritten or unused.
            write: the bytes that are written back, because they are changed.
        """

    @abc.abstractmethod
    def settle(self) -> None:
        """Block until all writes have ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory, threads and files."""


@final
class ElsewhereTier(Tier):
    """The tier of a rank that neither reads nor updates: other ranks of its host keep the bytes."""

    def is_here(self, stage: int) -> bool:
        return False

    def resident_wire(self, stage: int) -> None:
        return None

    def on_device(self, stage: int) -> None:
        return None

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        raise StoreError(
            f"stage {self.layouts[stage].stage.name!r} cannot be read on this rank, which does not keep it",
            remedy="read weights that are on disk on the first rank of the host",
        )

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        pass

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        return iter(())

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass
