"""Runs the optimizer over the pieces of a stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

import torch

from headwater.store.gradients.port import Gradients
from headwater.store.kept import StoredMasks
from headwater.store.layout import Group, Scalars, StageLayout
from headwater.store.masters import Workspaces
from headwater.store.native_pieces import NativePieces
from headwater.store.piece_update import StageJob
from headwater.store.rules import UpdateRules
from headwater.store.torch_pieces import TorchPieces
from headwater.store.update import Pending, Progress

if TYPE_CHECKING:
    from headwater.store.native_adam import AdamKernel


@functools.cache
def checked_adam() -> AdamKernel | None:
    """Return the native kernel of Adam, or `None`: see `native_check`."""
    # Imported only when a parameter suits the kernel, because the check builds optimizers.
    from headwater.store.native_check import checked_adam as checked

    return checked()


@final
class Updater:
    """Applies updates to stages, in the thread of the caller.

    Args:
        rule: how a piece is updated.
        kernel: returns the native kernel of Adam, or `None`: then torch's optimizer updates all pieces.
        masks: the masks of parameters; none if not given.
    """

    def __init__(
        self,
        rule: UpdateRules,
        kernel: Callable[[], AdamKernel | None] | None = None,
        masks: StoredMasks | None = None,
    ) -> None:
        self._rule = rule
        self._masks = masks or StoredMasks()
        self._kernel = kernel or checked_adam
        self._workspaces = Workspaces()

    def close(self) -> None:
        """Free the workspaces of the calling thread."""
        self._workspaces.clear()

    def apply(
        self,
        layout: StageLayout,
        image: torch.Tensor,
        groups: Iterable[tuple[Group, torch.Tensor]],
        gradients: Gradients,
        scalars: list[Scalars | None],
        pending: Pending,
        progress: Progress,
    ) -> None:
        """Run the optimizer over the pieces of a stage that are not done.

        Args:
            layout: the layout of the stage.
            image: its wire image; changed in place. The optimizer runs on its device.
            groups: the groups with the pieces that this rank owns, and their bytes; changed in place.
            gradients: one per parameter, on the same device; each is set to `None` when its parameter is
                updated.
            scalars: the optimizer scalars of each parameter, from which each of its pieces starts.
            pending: the update of each parameter.
            progress: the pieces that are done; changed.

        Raises:
            torch.OutOfMemoryError: if the device has no memory left. If `progress.undoable`, each piece that
                is not done then has its old values.
        """
        kept = self._masks.by_param(layout.stage.index)
        job = StageJob(layout, self._rule, image, gradients, scalars, pending, progress, kept)
        native = NativePieces(job, self._kernel)
        for group, rest in groups:
            changed = [p for p in group.pieces if p.param in pending.parts and gradients[p.param] is not None]
            missing = [piece for piece in changed if not progress.has(piece)]
            own = [piece for piece in missing if native.takes(piece.param)]
            native.apply(own, rest)
            others = [piece for piece in missing if not native.takes(piece.param)]
            if others:
                TorchPieces(job, self._workspaces).apply(others, rest)
            for piece in changed:
                # The gradient is freed early: the gradients of a stage may be as large as its weights.
                if piece.stop == layout.stage.params[piece.param].stored_numel:
                    gradients[piece.param] = None
