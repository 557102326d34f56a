"""The weight store: keeps weights by stage, sums gradients, and applies updates when a stage is fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, final

import torch

from headwater.core.interrupts import uninterrupted
from headwater.core.stage import ParamKey, ParamSpec
from headwater.core.streams import IMMEDIATE, Stream
from headwater.fabric.fabric import ALONE, Board, Fabric
from headwater.fabric.link import Link
from headwater.store.gradients.port import GradientSink, check_sparse, editable
from headwater.store.gradients.status import NO_NORMS
from headwater.store.kept import StoredMasks
from headwater.store.ledger import Ledger
from headwater.store.ownership import Ownership
from headwater.store.parameters import Parameters
from headwater.store.rules import UpdateRules
from headwater.store.scalars import OptimizerScalars
from headwater.store.stage_update import StageUpdate
from headwater.store.stages import StageAccess
from headwater.store.tier import Tier
from headwater.store.update import Part, Update, non_finite_error
from headwater.store.updater import Updater

if TYPE_CHECKING:
    from headwater.store.in_backward import BackwardUpdates


@dataclasses.dataclass(frozen=True)
class Committed:
    """The result of a commit: the parameters that it updates, and the norm of the gradients.

    Attributes:
        gradient_norm: global 2-norm before clipping.
        applied: `False` if the step was dropped because a gradient was not finite.
        params: the parameters that it updates.
    """

    gradient_norm: float
    applied: bool
    params: Sequence[ParamKey] = ()


@dataclasses.dataclass(frozen=True)
class SnapshotChannel:
    """The channels by which ranks tell each other which stages a snapshot has saved.

    Attributes:
        saved: by stage, 1 + the number of the last commit in the last snapshot that has saved it; 0 at first.
        link: the connection by which leaders send their hosts' pieces.
    """

    saved: Board
    link: Link | None


@final
class WeightStore:
    """Keeps masters and optimizer state of every stage, sums gradients, and applies updates.

    All reads see the values with every committed update applied, although an update is applied only when its
    stage is next needed ("update on fetch"). Any thread may call the store; one at a time works on a stage.

    Attributes:
        stages: the stages.
        rule: how parameters are updated.
        tier: where the bytes lie.
        fabric: the ranks that share the store.
        ownership: which rank updates which pieces.
        await_gradients: blocks until gradients that are on their way from the device are added; set by the
            object that copies them.
        ledger: the updates that were committed.
        scalars: the scalars of the optimizer.
        access: locks stages and applies pending updates.
        parameters: the values of parameters and of optimizer state.
        snapshots: used by snapshots on several ranks.
        owner: an object that lives as long as the store; see `headwater.api.registry`.
        in_backward: applies updates during the backward of a step; `None` if they wait until stages are
            fetched. The engine sets it.

    Args:
        rule: how parameters are updated.
        tier: keeps the bytes of the stages.
        ownership: which rank updates which pieces.
        gradients: sums gradients until an update uses them.
        order: every parameter in the model's order, in which norms are combined.
        fabric: the ranks that share the store; each updates its own pieces. All of them commit, fetch, write
            and flush the same stages in the same order.
    """

    def __init__(
        self,
        rule: UpdateRules,
        tier: Tier,
        ownership: Ownership,
        gradients: GradientSink,
        *,
        order: Sequence[ParamKey] | None = None,
        fabric: Fabric = ALONE,
    ) -> None:
        self.stages = [layout.stage for layout in tier.layouts]
        self.rule = rule
        self.tier = tier
        self.fabric = fabric
        self.ownership = ownership
        self._gradients = gradients
        self.await_gradients: Callable[[], None] = lambda: None
        self.ledger = Ledger()
        self.scalars = OptimizerScalars(self.stages, ownership, fabric)
        masks = StoredMasks()
        update = StageUpdate(Updater(rule, masks=masks), tier, ownership, gradients, self.scalars)
        self.access = StageAccess(fabric, tier, ownership, self.ledger, update)
        self.parameters = Parameters(rule, tier, ownership, self.access, gradients, masks)
        self.snapshots = SnapshotChannel(Board(fabric, len(self.stages)), fabric.connect("a checkpoint"))
        self.owner: object = None
        self.in_backward: BackwardUpdates | None = None
        self._order = order or [(s.index, p) for s in self.stages for p in range(len(s.params))]

    @property
    def gradients(self) -> GradientSink:
        """The sums of gradients that wait for an update. Blocks until those on their way are added."""
        self.await_gradients()
        return self._gradients

    def spec(self, key: ParamKey) -> ParamSpec:
        """Return the shape, dtype and name of a parameter."""
        return self.stages[key[0]].params[key[1]]

    # weights

    def fetch(
        self,
        stage: int,
        into: torch.Tensor | None = None,
        up_to: int | None = None,
        stream: Stream = IMMEDIATE,
    ) -> None:
        """Apply the pending update of a stage, then copy the stage's wire image to `into`.

        Args:
            stage: the stage.
            into: uint8 memory for the wire image, page-aligned host memory in the disk tier. May be left out
                where the image is read in place: see `Tier.resident_wire` and `Tier.on_device`.
            up_to: do not apply an update that was committed after this number; see `Ledger.num_commits`.
            stream: queue for the copy of an image that is in memory. The store changes the image only after
                the copy.
        """
        self.access.fetch(stage, into, up_to, stream)

    def version(self, stage: int) -> int:
        """Return a counter. It grows whenever the wire image changes that `fetch` copies."""
        return self.access.version(stage)

    @uninterrupted
    def flush_stage(self, stage: int) -> None:
        """Apply the pending update of a stage now."""
        self.access.flush(stage)

    @uninterrupted
    def flush(self) -> None:
        """Apply every pending update now."""
        for stage in range(len(self.stages)):
            self.access.flush(stage)
        # Raises the error of a write in the background here, not in a later step.
        self.tier.settle()
        if self.tier.writes_behind:  # other ranks of the host read what this rank has written
            self.fabric.barrier("all updates to be written")

    # a step

    def begin_step(self) -> None:
        """Discard the gradients that an interrupted step has left."""
        self.gradients.discard()

    def add_gradient(
        self, key: ParamKey, gradient: torch.Tensor, *, last: bool, norm: torch.Tensor | None = None
    ) -> None:
        """Add one parameter's gradient of one micro-batch. The caller must not use the tensor afterwards.

        Args:
            key: the parameter.
            gradient: the gradient, on `gradient_device`, in the parameter's shape.
            last: true if no further micro-batch of the step is expected.
            norm: the 2-norm of `gradient`, if it was measured on the device; in host memory.

        Raises:
            StreamError: if the gradient is sparse and cannot be kept.
        """
        # Not `self.gradients`: a thread that adds gradients would wait for itself.
        gradients = self._gradients
        if gradient.is_sparse:
            check_sparse(self.spec(key), several_ranks=gradients.is_shared)
        if self.in_backward is not None:
            self.in_backward.refuse_late(key)
        self.access.flush(key[0])  # an older update must use the older gradients first
        must_wait = gradients.add(key, gradient, last=last, norm=norm)
        if self.in_backward is not None and last:
            self.in_backward.arrived(key)
        if must_wait:
            # Updates are first: the additions may wait for other ranks, which may wait for these updates.
            self.access.catch_up_all()
            if self.in_backward is not None:
                self.in_backward.let_others_pass()
            gradients.drain()

    @uninterrupted
    def set_gradient(self, key: ParamKey, gradient: torch.Tensor) -> None:
        """Replace the gradient sum of one parameter. The caller may change the tensor until the commit.

        Args:
            key: the parameter.
            gradient: the new sum, on any device, in the parameter's shape.

        Raises:
            StreamError: for gradients of several ranks in `train_step`, or a sparse one that cannot be kept.
        """
        if gradient.is_sparse:
            check_sparse(self.spec(key), several_ranks=self.gradients.is_shared)
        # Otherwise a pending update of the stage would use the new sum.
        self.access.flush(key[0])
        editable(self.gradients).replace(key, gradient.to(self.gradient_device(key[0])))

    @uninterrupted
    def borrow_gradient(self, key: ParamKey) -> torch.Tensor | None:
        """Return the gradient sum of one parameter, or `None`; see `GradientSink.borrow`."""
        gradients = self.gradients
        with self.access.without_updates([key[0]]):
            return gradients.borrow(key)

    @uninterrupted
    def drop_gradient(self, key: ParamKey) -> None:
        """Discard the gradient sum of one parameter; see `GradientSink.drop`."""
        gradients = self.gradients
        # If a commit has taken the sum, as usual after a step, nothing is dropped. Then do not wait for the
        # update.
        with self.access.without_updates([key[0]] if key in gradients.status.present else []):
            gradients.drop(key)

    def gradient_device(self, stage: int) -> torch.device:
        """Return the device of a stage's gradients: `cpu`, unless they stay in device memory."""
        place = self.tier.on_device(stage)
        # Ranks sum their gradients in memory that all of them reach.
        return torch.device("cpu") if place is None or self.fabric.size > 1 else place.wire.device

    @uninterrupted
    def end_micro_batch(self) -> None:
        """Tell the store that this rank has no more gradients of this micro-batch."""
        if self._gradients.is_shared:
            self.access.catch_up_all()  # other ranks may need stages that this rank has not fetched
            self.ledger.note_all_used()  # other ranks may have used these updates, so none can be undone
        # Not `self.gradients`: a thread that adds gradients would wait for itself.
        self._gradients.end_micro_batch()
        if self.in_backward is not None:
            self.in_backward.let_others_pass()

    @uninterrupted
    def commit(self, update: Update, parts: Mapping[ParamKey, Update] | None = None) -> Committed:
        """End a step: all later reads return values with the step's update applied.

        Args:
            update: the step.
            parts: the parameters that the step updates, each with an `Update` that may have other options.
                Other parameters keep their gradients. If not given, all parameters with a gradient are
                updated, with `update`.

        Raises:
            NonFiniteError: if a gradient is not finite and such steps are not skipped. Then nothing changes.
        """
        self.gradients.complete()
        present = self._gradients.status.present
        # The order of a sum decides the last bits of the norm.
        keys = [key for key in self._order if key in present and (parts is None or key in parts)]
        # Another optimizer may have committed other parameters of the same stages.
        with self.access.without_updates({stage for stage, _ in keys}):
            committed = self._commit(keys, update, parts)
        if committed.applied and self.in_backward is not None:
            self.in_backward.committed()
        return committed

    def _commit(
        self, keys: Sequence[ParamKey], update: Update, parts: Mapping[ParamKey, Update] | None
    ) -> Committed:
        """Commit the gradient sums of these parameters; see `commit`."""
        status = self._gradients.status
        used = NO_NORMS if self.in_backward is None else self.in_backward.norms
        norm, every = self._gradients.norm(keys), keys
        if used:
            every = [key for key in self._order if key in used or key in status.present]
            norm = status.norm(every, used)
        # The sums stay scaled until the update, so their norm is unscaled here.
        norm = norm / update.loss_scale
        if not bool(norm.isfinite()):
            # The error is made before the sums are dropped, which clears `first_bad`.
            error = non_finite_error(self.stages, status.first_bad, update)
            for key in keys:
                self._gradients.drop(key)
            status.first_bad = None
            if not update.skip_non_finite:
                raise error
            return Committed(float(norm), applied=False)
        factor = update.factor(norm)
        # The gradients are committed before another thread can see the update, which needs them.
        self._gradients.commit(keys, {stage for stage, _ in keys if self.ownership.updates(stage)})
        # The count follows everything that may fail: after an error above nothing is committed.
        self.ledger.num_commits += 1
        # A roll-back needs this: it gives back the gradients of commits that it undoes.
        self.ledger.take_gradients(keys)
        by_stage: dict[int, dict[int, Part]] = {}
        for stage, param in keys:
            options = update if parts is None else parts[stage, param]
            by_stage.setdefault(stage, {})[param] = Part(self.ledger.num_commits, options, factor)
        for stage in by_stage:
            place = self.tier.on_device(stage)
            if place is not None:
                place.commit()
        # This is last: from here on another thread may apply the updates.
        self.access.commit(by_stage)
        return Committed(float(norm), applied=True, params=every)

    # steps that may have to be undone

    def begin_transaction(self, present: Collection[ParamKey] | None = None) -> None:
        """Begin a transaction: `roll_back` can undo commits and gradients that come after this call.

        Args:
            present: the gradients to which `roll_back` returns; all that are present if not given.
        """
        self.ledger.begin()
        editable(self.gradients).remember(present)

    def end_transaction(self) -> None:
        """End a transaction and keep its commits and gradients: they can no longer be rolled back."""
        editable(self.gradients).forget()

    def roll_back(self) -> bool:
        """Undo commits and gradients since `begin_transaction`. Commits whose weights were used stay.

        Returns:
            True if all of them are undone.
        """
        # This is outside of the context below, because the thread that adds gradients may need a stage.
        gradients = editable(self.gradients)
        # An update that another thread has begun would lose its gradients: the ledger does not list it.
        with self.access.without_updates(range(len(self.stages))):
            # `undo` is first: a fetch thread must not apply an update whose gradient is given back below.
            undone = self.access.undo()
            gradients.restore(undone.taken, self.ledger.waiting(), undone.keys)
            return undone.is_complete

    @uninterrupted
    def close(self) -> None:
        """Release memory, threads and files, also if a part of the store raises an error."""
        with ExitStack() as closed:  # calls these in reverse order
            closed.callback(self.tier.close)
            if self.snapshots.link is not None:
                closed.callback(self.snapshots.link.close)
            closed.callback(self._gradients.close)
            closed.callback(self.await_gradients)
            closed.callback(self.access.close)  # before the gradients and the tier, which its threads use
            if self.in_backward is not None:
                closed.callback(self.in_backward.close)
