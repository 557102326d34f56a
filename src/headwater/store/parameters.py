"""Reading and writing of masters and optimizer state, by stage or by parameter."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, final

import torch

from headwater.core.errors import StoreError
from headwater.core.gather import gather
from headwater.core.interrupts import uninterrupted, uninterrupted_items
from headwater.core.stage import ParamKey, ParamSpec
from headwater.core.threads import one_core
from headwater.sparsity.masks import PackedMask
from headwater.store.gradients.port import GradientSink
from headwater.store.kept import StoredMasks
from headwater.store.layout import Piece
from headwater.store.ownership import Ownership
from headwater.store.pieces import Pieces, PieceState
from headwater.store.rules import UpdateRules
from headwater.store.tier import Tier

if TYPE_CHECKING:
    from headwater.store.stages import StageAccess


StoredName = tuple[int, str | None]
"""A tensor of a stage: the index of its parameter, and the name of a state tensor (`None`: the master)."""


@final
class Parameters:
    """Reads and writes the masters and optimizer state of a store. Reads apply pending updates first.

    Attributes:
        masks: the masks by which elements of parameters are left out.
        put_copy_in_file: puts memory for a copy of values into a file; returns False to keep it in memory.
        pieces: reads and writes the pieces of a stage for a caller that holds the stage's lock.

    Args:
        rule: how parameters are updated.
        tier: where the bytes lie.
        ownership: which rank updates which pieces.
        access: locks stages and applies pending updates.
        gradients: the gradients; those of a replaced stage are dropped.
        masks: the masks of parameters.
    """

    def __init__(
        self,
        rule: UpdateRules,
        tier: Tier,
        ownership: Ownership,
        access: StageAccess,
        gradients: GradientSink,
        masks: StoredMasks,
    ) -> None:
        self.masks = masks
        self.put_copy_in_file: Callable[[mmap.mmap], bool] = lambda memory: False
        self.pieces = Pieces(rule, tier, ownership, masks)
        self._rule = rule
        self._tier = tier
        self._ownership = ownership
        self._access = access
        self._gradients = gradients

    @uninterrupted_items
    def read(
        self,
        stage: int,
        *,
        states: Collection[str] | None = None,
        up_to: int | None = None,
        params: Collection[int] | None = None,
        mine: bool = False,
    ) -> Generator[PieceState, None, None]:
        """Yield every piece of a stage that this rank can read, with pending updates applied.

        A piece is valid until the next one. The stage's lock is held until the generator ends or is closed.

        Args:
            stage: the stage.
            states: names of the state tensors to read; all if not given.
            up_to: do not apply an update that was committed after this number.
            params: only these parameters, by index.
            mine: only the pieces that this rank updates.
        """
        if self._ownership.updates(stage) if mine else self._tier.is_here(stage):
            with self._access.reading(stage, up_to, params) as image:
                yield from self.pieces.read(stage, image, states=states, params=params, mine=mine)

    def own_pieces(self, stage: int) -> list[Piece]:
        """Return the pieces that this rank updates, in the order in which `write` fills them."""
        return [piece for group in self._ownership.own_groups(stage) for piece in group.pieces]

    def own_ranges(self, stage: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, first element, end) of each `PieceState` that `write` fills, in order."""
        return self.pieces.ranges(stage, self.own_pieces(stage))

    @uninterrupted
    def remask(self, key: ParamKey, mask: PackedMask) -> None:
        """Change the mask of a parameter whose masked elements the store leaves out; see `Pieces.remask`.

        Args:
            key: the parameter.
            mask: its new mask.
        """
        stage, param = key
        with self._access.changing(stage, {param}) as image:
            assert image is not None, "a rank alone updates all stages"
            self.pieces.remask(stage, image, param, mask)

    @uninterrupted
    def write(self, stage: int, fill: Callable[[PieceState], None]) -> None:
        """Replace all values of a stage. All ranks call this function together.

        Args:
            stage: the stage.
            fill: called with every piece that this rank updates; writes its `master` and `states`.
        """
        with self._access.replacing(stage) as image, one_core():
            for param in range(len(self._tier.layouts[stage].stage.params)):
                # Gradients of the old values do not belong to the new ones.
                self._gradients.drop((stage, param))
            if self._gradients.take(stage) is not None:  # also gradients that a commit has taken
                self._gradients.put_back(stage, [])
            self.pieces.write(stage, image, fill)

    @uninterrupted
    def change(
        self,
        stage: int,
        params: Collection[int],
        change: Callable[[PieceState], None],
        states: Collection[str] | None = None,
    ) -> None:
        """Change parameters of a stage in place. All ranks call this function together.

        Args:
            stage: the stage.
            params: the parameters, by index.
            change: called with every piece that this rank updates, up to date; changes `master` and `states`.
            states: names of the state tensors that it uses; all if not given.
        """
        with self._access.changing(stage, params) as image:
            if image is not None:
                self.pieces.change(stage, image, params, change, states)

    @uninterrupted
    def read_param(self, key: ParamKey, state: str | None = None) -> torch.Tensor:
        """Return a copy of a parameter's master or optimizer state tensor, with pending updates applied.

        Args:
            key: the parameter.
            state: name of the state tensor; the master if not given.

        Raises:
            StoreError: if this rank cannot read all of it.
        """
        stage, param = key
        spec = self._spec(key)
        shape, dtype = self._shape_and_dtype(key, state)
        out = gather((run for _, run in self.runs(stage, {(param, state)})), shape, dtype)
        is_like_it = state is None or out.shape == spec.shape
        return spec.like_the_parameter(out) if is_like_it else out

    def runs(
        self, stage: int, wanted: Collection[StoredName]
    ) -> Generator[tuple[StoredName, torch.Tensor], None, None]:
        """Yield masters and optimizer state tensors of a stage, in one pass, with pending updates applied.

        Args:
            stage: the stage.
            wanted: the tensors.

        Yields:
            The tensor, and a run of its values, 1-D; the runs of a tensor come in order. A run is valid until
            the next one.

        Raises:
            StoreError: if this rank cannot read all values of a tensor.
        """
        missing = {(p, name): math.prod(self._shape_and_dtype((stage, p), name)[0]) for p, name in wanted}
        states = {name for _, name in wanted if name is not None}
        # The generator is closed at once, because it holds the stage's lock.
        with closing(self.read(stage, states=states, params={param for param, _ in wanted})) as pieces:
            for piece in pieces:
                values: list[tuple[str | None, torch.Tensor]] = [(None, piece.master), *piece.states.items()]
                for name, run in values:
                    if (piece.param, name) in missing:
                        missing[piece.param, name] -= run.numel()
                        yield (piece.param, name), run.view(-1)
        # Otherwise undefined memory would be used as weights.
        short = next((param for (param, _), count in missing.items() if count), None)
        if short is not None:
            raise StoreError(
                f"rank {self._ownership.rank} cannot read all of {self._spec((stage, short)).name}: other "
                "ranks hold a part of it",
                remedy="save a checkpoint, and read the parameter from it",
            )

    @uninterrupted
    def write_param(self, key: ParamKey, value: torch.Tensor, state: str | None = None) -> None:
        """Replace a parameter's master, or its optimizer state tensor `state`, by `value`.

        All ranks call this function together, with equal values.

        Args:
            key: the parameter.
            value: the new values, in the shape of the master or the state; converted to its dtype.
            state: name of the state tensor; the master if not given.
        """
        stage, param = key
        shape, _ = self._shape_and_dtype(key, state)
        flat = value.reshape(shape).reshape(-1)

        # A state tensor is not part of the wire image.
        in_image = {param} if state is None else ()
        with self._access.changing(stage, in_image, overwrite=True) as image:
            if image is not None:
                with one_core():
                    self.pieces.replace(stage, image, param, state, flat)

    def _shape_and_dtype(self, key: ParamKey, state: str | None) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of a parameter's master, or of its optimizer state tensor `state`."""
        spec = self._spec(key)
        if state is None:
            return spec.shape, spec.dtype
        layout = self._rule.state_layout(spec)[state]
        return layout.shape_for(spec), layout.dtype

    def _spec(self, key: ParamKey) -> ParamSpec:
        return self._tier.layouts[key[0]].stage.params[key[1]]
