"""The weight store: hands out weights by stage, takes gradients, updates a stage when it is next needed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import HeadwaterError, NonFiniteError, StoreError, StreamError
from headwater.core.stage import ParamKey, ParamSpec
from headwater.fabric.fabric import ALONE, Board, Fabric
from headwater.store.gradients.port import EditableGradients, GradientSink
from headwater.store.ledger import Ledger
from headwater.store.ownership import Ownership
from headwater.store.pieces import Pieces, PieceState
from headwater.store.propagation import Propagation
from headwater.store.rule import Scalars, UpdateRule
from headwater.store.sparse import check_kind
from headwater.store.tier import Tier
from headwater.store.update import Part, Update, Updater


@dataclasses.dataclass(frozen=True)
class Committed:
    """What became of a step.

    Attributes:
        gradient_norm: global 2-norm before clipping.
        applied: `False` if the step was dropped because a gradient was not finite.
        params: the parameters that it updates.
    """

    gradient_norm: float
    applied: bool
    params: Sequence[ParamKey] = ()


_SCALARS_BY_KEY = dict[ParamKey, dict[str, torch.Tensor | bool | int | float | str | None] | None]
"""The type of what ranks tell each other of optimizer scalars."""


class WeightStore:
    """Masters and optimizer state of every stage.

    What is read from it is always as if every committed update had been applied, although each is applied
    only when its stage is next needed ("update on fetch"). Any thread may call it; one at a time works on a
    stage.

    Attributes:
        ledger: the updates that were committed.
        ownership: which rank updates what.
        propagation: when all ranks have updated a stage.
        pieces: what of each stage is kept here and elsewhere.
        snapshots: by stage, one more than the number of commits of which a snapshot has saved it.
        snapshot_link: by which hosts send what they have for a snapshot.
        before_update: called with (stage, number of the commit) just before that update changes the stage, or
            what comes before it, by the thread that holds the stage; for snapshots.

    Args:
        rule: how parameters are updated.
        tier: keeps the bytes of the stages.
        ownership: which rank updates which pieces.
        gradients: sums gradients until an update uses them.
        order: (stage, param) of every parameter in the model's order, in which norms are combined.
        fabric: the ranks that share the store; each updates its own pieces. All of them commit, fetch, write
            and flush the same in the same order.
    """

    def __init__(
        self,
        rule: UpdateRule,
        tier: Tier,
        ownership: Ownership,
        gradients: GradientSink,
        *,
        order: Sequence[ParamKey] | None = None,
        fabric: Fabric = ALONE,
    ) -> None:
        self.rule = rule
        self.layouts = tier.layouts
        self.stages = stages = [layout.stage for layout in tier.layouts]
        self.tier = tier
        self.fabric = fabric
        self.ownership = ownership
        self.propagation = Propagation(fabric, ownership, tier)
        self.gradients = gradients
        self.pieces = Pieces(rule, tier, ownership)
        self.snapshots = Board(self.fabric, len(self.stages))
        self.snapshot_link = self.fabric.connect("a checkpoint")
        self.ledger = Ledger()
        self.before_update: Callable[[int, int], None] = lambda stage, number: None
        self._order = order or [(s.index, p) for s in stages for p in range(len(s.params))]
        self._versions = [0] * len(self.stages)
        self._scalars: list[list[Scalars | None]] = [[None] * len(stage.params) for stage in stages]
        self._locks = [threading.RLock() for _ in stages]
        self._torn: dict[int, str] = {}  # stages of which a change began and did not end, and why
        self._updater = Updater(rule)
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="headwater-update")

    @property
    def num_commits(self) -> int:
        """Updates committed so far; the first has number 1."""
        return self.ledger.num_commits

    # reading weights

    def fetch(self, stage: int, into: torch.Tensor | None = None, up_to: int | None = None) -> None:
        """Bring a stage up to date, and its wire image to `into`.

        Args:
            stage: which stage.
            into: uint8 memory for the wire image (page-aligned host memory in the disk tier); may be left
                out in the memory tier, where the image is read in place: see `resident_wire`.
            up_to: leave an update committed after this number (see `num_commits`) for later.
        """
        self._wait_for_owners(stage, up_to)
        with self._whole(stage):
            resident = self.tier.resident_wire(stage)
            if not self._bring_up_to_date(stage, into, up_to) and resident is None:
                assert into is not None, "the disk tier needs memory to read a stage into"
                self.tier.read_wire(stage, into)
            if resident is not None and into is not None:
                count = self.layouts[stage].stage.slab_bytes
                into[:count].copy_(resident[:count], non_blocking=True)

    def resident_wire(self, stage: int) -> torch.Tensor | None:
        """Wire image in host memory, valid after `fetch`; `None` in the disk tier."""
        return self.tier.resident_wire(stage)

    def use(self) -> None:
        """Say that weights will be used from now on: what was committed cannot be undone any more."""
        self.ledger.note_used(self.num_commits)

    def version(self, stage: int) -> int:
        """Grows whenever a fetch of this stage will give another image than one before did."""
        return self._versions[stage]

    # gradients

    def begin_step(self) -> None:
        """Drop whatever an interrupted step has left."""
        self.gradients.discard()

    def add_gradient(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> None:
        """Take one parameter's gradient of one micro-batch; the tensor belongs to the store from now on."""
        check_kind(gradient, self.spec((stage, param)), self.gradients.is_shared)
        self.flush_stage(stage)  # not used since the last step: its older update comes first
        if self.gradients.add((stage, param), gradient, last=last):
            self._update_all_ahead()
            self.gradients.drain()

    def set_gradient(self, stage: int, param: int, gradient: torch.Tensor) -> None:
        """Let this be the sum of one parameter; the tensor belongs to the store from now on."""
        check_kind(gradient, self.spec((stage, param)), self.gradients.is_shared)
        self.flush_stage(stage)
        self.editable_gradients.replace((stage, param), gradient)

    @property
    def editable_gradients(self) -> EditableGradients:
        """The gradients, for a user's loop.

        Raises:
            StreamError: if they are those of several ranks in `train_step`.
        """
        if not isinstance(self.gradients, EditableGradients):
            raise StreamError(
                "gradients of several ranks cannot be looked at or changed", remedy="use one rank: num_csx 1"
            )
        return self.gradients

    def end_micro_batch(self) -> None:
        """Say that no more gradients of this micro-batch will come."""
        if self.gradients.is_shared:
            self._update_all_ahead()
            self.use()  # others have what this rank has left to them
        self.gradients.end_micro_batch()

    def commit(self, update: Update, parts: Mapping[ParamKey, Update] | None = None) -> Committed:
        """End a step: from now on the store reads as if it had been applied.

        Args:
            update: the step.
            parts: the parameters that it updates, each with an `Update` that may have other options; other
                parameters keep their gradients. By default all that have a gradient, with `update`.

        Raises:
            NonFiniteError: if a gradient is not finite and such steps are not skipped; the step leaves
                no trace.
        """
        self.gradients.complete()
        present = self.gradients.status.present
        keys = [key for key in self._order if key in present and (parts is None or key in parts)]
        norm = self.gradients.norm(keys) / update.loss_scale
        if not bool(norm.isfinite()):
            first = self.gradients.status.first_bad
            for key in keys:
                self.gradients.drop(key)
            self.gradients.status.first_bad = None
            if update.skip_non_finite:
                return Committed(float(norm), applied=False)
            raise NonFiniteError(
                f"the gradient of step {update.step} is not finite",
                where=f"stage {self.stages[first].name!r} first in backward" if first is not None else None,
                remedy="lower the learning rate, clip gradients, or look at the data of this step; "
                "the step was not applied",
            )
        self.ledger.num_commits += 1
        factor = update.factor(norm)
        # Before another thread can see the update, which would otherwise find no gradients.
        self.gradients.commit(keys, {stage for stage, _ in keys if self.ownership.updates(stage)})
        by_stage: dict[int, dict[int, Part]] = {}
        for stage, param in keys:
            options = update if parts is None else parts[stage, param]
            by_stage.setdefault(stage, {})[param] = Part(self.num_commits, options, factor)
            self.ledger.take_gradient((stage, param))
        for stage, changes in by_stage.items():
            self._add_pending(stage, changes)
        stages = sorted(by_stage)
        self.propagation.committed(stages, self.num_commits)
        if self.fabric.num_hosts > 1 or not self.fabric.computes:  # what others wait for comes at once
            for stage in stages:  # an error is told when the stage is used
                self._updates.submit(self._update_ahead, stage)
        return Committed(float(norm), applied=True, params=keys)

    def _add_pending(self, stage: int, parts: Mapping[int, Part]) -> None:
        """The parts of a commit wait for a stage, here or where it is updated."""
        if self.ownership.updates(stage):
            self.ledger.add(stage, parts)
        else:
            self.propagation.skipped(stage, self.num_commits)
        self._versions[stage] += 1  # at last: whoever sees it may fetch

    # steps that may have to be undone

    def begin_transaction(self, present: Collection[ParamKey] | None = None) -> None:
        """From now on `roll_back` can undo what comes.

        Args:
            present: the gradients that it is to leave; all that are there if not given.
        """
        self.ledger.begin()
        self.editable_gradients.remember(present)

    def end_transaction(self) -> None:
        """Keep what came."""
        self.editable_gradients.forget()

    def roll_back(self) -> bool:
        """Undo commits and gradients since `begin_transaction`, but for commits that a stage was used with.

        Returns:
            Whether all of them are undone.
        """
        last = self.ledger.last_kept
        for stage in self.ledger.stages:
            with self._locks[stage]:
                undone = self.ledger.undo(stage, last)
            if undone is not None:  # others may wait for it
                self.propagation.updated(stage, undone)
        self.editable_gradients.restore(self.ledger.taken(last), self.ledger.waiting())
        return self.ledger.is_undone(last)

    # updates

    def flush_stage(self, stage: int) -> None:
        """Apply the committed update of a stage now."""
        self._wait_for_owners(stage)
        with self._whole(stage):
            self._bring_up_to_date(stage, None)

    def flush(self) -> None:
        """Apply every committed update now."""
        for stage in range(len(self.stages)):
            self.flush_stage(stage)
        self.tier.settle()
        if self.tier.writes_behind:  # what one rank of a host has written another will read
            self.fabric.barrier("all updates to be written")

    def _update_all_ahead(self) -> None:
        """Apply what waits for stages that this rank has left out: others may wait for that."""
        for stage in self.ledger.stages:
            self._update_ahead(stage)

    def _update_ahead(self, stage: int) -> None:
        with torch.no_grad(), self._whole(stage):
            if stage in self.ledger:
                self._update(stage, self._wire_buffer(stage))

    def _bring_up_to_date(self, stage: int, buffer: torch.Tensor | None, up_to: int | None = None) -> bool:
        """Apply the update that waits for a stage, if one does; the stage is whole then.

        With `up_to` an update committed after this number is left for later, here and elsewhere.

        Returns:
            Whether the whole wire image is in `buffer` now, if it had to be read.
        """
        updated = self.ledger.due(stage, up_to) is not None
        if updated:
            self._update(stage, self._wire_buffer(stage) if buffer is None else buffer)
        self.propagation.wait(stage, up_to)
        return updated and self.fabric.num_hosts == 1

    def _update(self, stage: int, buffer: torch.Tensor | None) -> None:
        pending = self.ledger.due(stage)
        assert pending is not None, f"no update waits for stage {stage}"
        self.before_update(stage, pending.number)
        if self.fabric.num_hosts > 1:
            self.propagation.wait(stage)  # they may still be getting the update before
        with self._tearing(stage):
            self._apply(stage, buffer)

    @contextmanager
    def _tearing(self, stage: int) -> Iterator[None]:
        """What is between the beginning and the end of a change of a stage."""
        self._torn[stage] = "it was interrupted"
        try:
            yield
        except HeadwaterError as error:
            self._torn[stage] = error.what
            raise
        self._torn.pop(stage, None)

    def _apply(self, stage: int, buffer: torch.Tensor | None) -> None:
        pending = self.ledger.apply(stage)
        gradients = self.gradients.take(stage)
        assert gradients is not None, f"an update of stage {stage} was committed without gradients"
        with self.tier.wire(stage, buffer, write=True, part=self.ownership.own_bytes(stage)) as image:
            groups = self.tier.groups(stage, self.ownership.own_groups(stage), write=True)
            self._scalars[stage] = self._updater.apply(
                self.stages[stage],
                image,
                groups,
                gradients,
                self._scalars[stage],
                pending,
                lambda piece: self.ownership.is_mine(stage, piece),
            )
        self.gradients.put_back(stage, gradients)
        self.propagation.updated(stage, pending.number)

    def _wait_for_owners(self, stage: int, up_to: int | None = None) -> None:
        """Wait for an update of which no part is this rank's, before the stage is locked.

        Those who have one may wait for a snapshot, which this rank saves under that lock.
        """
        if not self.ownership.updates(stage):
            self.ledger.note_used(self.propagation.wait(stage, up_to))

    @contextmanager
    def _whole(self, stage: int) -> Iterator[None]:
        """Work on a stage alone, and not if a change of it has failed: part of it is done, part lost."""
        with self._locks[stage]:
            if stage in self._torn:
                raise StoreError(
                    f"an update of stage {self.stages[stage].name!r} failed halfway: {self._torn[stage]}",
                    remedy="resume from the last checkpoint",
                )
            yield

    def _wire_buffer(self, stage: int) -> torch.Tensor | None:
        if self.tier.resident_wire(stage) is not None:
            return None
        return aligned_empty(self.layouts[stage].wire_bytes)

    # whole stages, for checkpoints

    def exclusive(self, stage: int) -> AbstractContextManager[object]:
        """Keeps other threads away from a stage while the context is open; may be nested."""
        return self._locks[stage]

    def read(
        self,
        stage: int,
        *,
        with_states: bool = True,
        up_to: int | None = None,
        params: Collection[int] | None = None,
        mine: bool = False,
    ) -> Generator[PieceState, None, None]:
        """Every piece of a stage that this rank reaches, up to date; valid until the next one is asked for.

        Args:
            stage: which stage.
            with_states: whether the optimizer state is wanted too.
            up_to: leave an update committed after this number (see `num_commits`) for later.
            params: only these parameters, by index.
            mine: only the pieces that this rank updates.
        """
        if not (self.ownership.updates(stage) if mine else self.tier.is_here):
            return
        if up_to is None:
            self._wait_for_owners(stage)
        with self._whole(stage):
            buffer = self._wire_buffer(stage)
            self._bring_up_to_date(stage, buffer, up_to)
            with self.tier.wire(stage, buffer, write=False, part=self.ownership.own_bytes(stage)) as image:
                yield from self.pieces.read(stage, image, with_states=with_states, params=params, mine=mine)

    def write(self, stage: int, fill: Callable[[PieceState], None]) -> None:
        """Replace a stage: `fill` is called with every piece and writes its `master` and `states`."""
        with self._locks[stage]:
            self._torn.pop(stage, None)
            self.ledger.forget(stage)
            for param in range(len(self.stages[stage].params)):
                self.gradients.drop((stage, param))
            self.gradients.take(stage)  # and what a commit has taken
            self._versions[stage] += 1
            image = self.tier.resident_wire(stage)
            target = image if image is not None else aligned_empty(self.layouts[stage].wire_bytes)
            self.pieces.write(stage, target, fill)
            if image is None and self.ownership.updates(stage):
                self.tier.write_wire(stage, target, self.ownership.own_bytes(stage))
            self.propagation.written(stage)

    def change(self, stage: int, params: Collection[int], change: Callable[[PieceState], None]) -> None:
        """Change parameters of a stage in place; every rank asks for it, and changes what it updates of them.

        Args:
            stage: which stage.
            params: the parameters, by index.
            change: called with every piece, up to date; it changes `master` and `states`.
        """
        self.fabric.neighbours.barrier("a stage to be changed")  # others may still read what it was
        self._wait_for_owners(stage)
        updates = self.ownership.updates(stage)
        with self._whole(stage):
            buffer = self._wire_buffer(stage) if updates else None
            self._bring_up_to_date(stage, buffer)
            self.before_update(stage, self.num_commits + 1)
            part = self.ownership.own_bytes(stage)
            if updates:
                with self._tearing(stage), self.tier.wire(stage, buffer, write=True, part=part) as image:
                    self.pieces.change(stage, image, params, change)
        # Others may wait for updates of this rank before they come here, and these for the stage.
        self.propagation.written(stage)
        self._versions[stage] += 1  # at last: whoever sees it may fetch

    def spec(self, key: ParamKey) -> ParamSpec:
        """What is known of a parameter."""
        return self.stages[key[0]].params[key[1]]

    def scalars(self, stage: int) -> list[Scalars | None]:
        """Optimizer scalars of each parameter, up to date after `read` or `flush_stage`."""
        return self._scalars[stage]

    def share_scalars(self) -> None:
        """Let every rank have the optimizer scalars of all parameters; all updates must have been applied."""
        mine = {
            (stage.index, index): self._scalars[stage.index][index]
            for stage in self.stages
            for index in range(len(stage.params))
            if self.ownership.is_first_of_mine(stage.index, index)
        }
        for scalars in self.fabric.gather_objects(mine, _SCALARS_BY_KEY):
            for (stage, param), value in scalars.items():
                self._scalars[stage][param] = value

    def set_scalars(self, stage: int, scalars: list[Scalars | None]) -> None:
        """Replace the optimizer scalars of each parameter."""
        self._scalars[stage] = scalars

    def close(self) -> None:
        """Give back memory, threads and files."""
        self._updates.shutdown(wait=True, cancel_futures=True)
        self.propagation.close()
        self.gradients.close()
        self.tier.close()
