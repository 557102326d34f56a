"""Interfaces to gradients: the operations that the weight store needs, and those that a user's loop adds."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from headwater.core.errors import StreamError
from headwater.core.stage import ParamKey, ParamSpec
from headwater.store.gradients.status import GradientStatus
from headwater.store.layout import PIECE_ELEMENTS

Gradients = list[Tensor | None]
"""One gradient per parameter of a stage; `None` for a parameter without one."""


class GradientSink(abc.ABC):
    """Sums the gradients of a step over micro-batches and ranks, and hands the sums to the updates.

    Implementations are final; `make_gradients` chooses one. The weight store calls them, one thread at a time
    for each stage. A sum is *present* until a commit takes it or it is dropped. A sum that a commit has taken
    waits for the update of its stage.

    Attributes:
        status: the sums that are present, and their norms.
        is_shared: true if other ranks add to the same sums.
    """

    status: GradientStatus
    is_shared: bool

    @abc.abstractmethod
    def add(self, key: ParamKey, gradient: Tensor, *, last: bool, norm: Tensor | None = None) -> bool:
        """Add the gradient of one parameter in one micro-batch to the parameter's sum.

        Args:
            key: the parameter.
            gradient: the gradient. The caller must not use the tensor afterwards.
            last: true if no further micro-batch of the step is expected.
            norm: the 2-norm of `gradient` in fp32 or wider, if it is known already.

        Returns:
            True if too many gradients wait to be added: the caller calls `drain` before it computes more.
        """

    @abc.abstractmethod
    def drain(self) -> None:
        """Block until the gradients that wait to be added are no more than those of one stage.

        Additions may wait for ranks that wait for an update of this rank. So the caller first applies the
        updates that this rank owes.
        """

    @abc.abstractmethod
    def end_micro_batch(self) -> None:
        """Record that this rank has no more gradients for this micro-batch."""

    @abc.abstractmethod
    def complete(self) -> None:
        """Block until the gradients of all ranks are summed, so that `status.present` is known."""

    @abc.abstractmethod
    def norm(self, keys: Sequence[ParamKey]) -> Tensor:
        """Return the global norm of these sums in fp32, in the order of `keys`. Call `complete` first."""

    @abc.abstractmethod
    def commit(self, keys: Iterable[ParamKey], stages: Collection[int]) -> None:
        """Give these sums to an update: they are not in `status.present` from now on.

        Args:
            keys: the sums.
            stages: the stages that this rank updates. Sums of other stages are not needed here any more.
        """

    @abc.abstractmethod
    def take(self, stage: int) -> Gradients | None:
        """Remove and return the gradients that wait for a stage's update, or `None` if nothing waits."""

    @abc.abstractmethod
    def put_back(self, stage: int, gradients: Gradients) -> None:
        """Put back gradients that `take` has returned and an update did not use."""

    @abc.abstractmethod
    def drop(self, key: ParamKey) -> None:
        """Discard the sum of one parameter. Do nothing if a commit has taken the sum.

        With several ranks in `train_step` all ranks call this, after `complete`; before that it does nothing.
        """

    @abc.abstractmethod
    def discard(self) -> None:
        """Discard every sum that no commit has taken. Called when a step begins."""

    @abc.abstractmethod
    def borrow(self, key: ParamKey) -> Tensor | None:
        """Return the sum of one parameter for reading, or `None` if it is not present.

        With several ranks all ranks call this function together, after `complete`.
        """

    @abc.abstractmethod
    def loop_tensor(self, key: ParamKey, like: Tensor) -> Tensor | None:
        """Return the tensor that the loop got as a gradient and still keeps, or `None`.

        The result is `None` too if its dtype, shape or layout is not that of `like`, or with several ranks.
        """

    @abc.abstractmethod
    def multiply(self, key: ParamKey, factor: Callable[[], Tensor]) -> None:
        """Multiply the sum of one parameter by `factor()`, if the sum is present.

        All ranks call this function, after `complete`. Before a sum is read again, call `complete` again.

        Args:
            key: the parameter.
            factor: returns a tensor of its shape; called only on a rank that needs it.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory, threads and files."""


class EditableGradients(GradientSink):
    """Gradient sums that a user's loop may read, change and keep over steps, as `grad` in plain PyTorch.

    Here a tensor that `borrow` has returned may be changed in place until the commit. With several ranks all
    ranks must make the same changes.
    """

    @abc.abstractmethod
    def replace(self, key: ParamKey, gradient: Tensor) -> None:
        """Replace the sum of one parameter. The caller may change the tensor in place until the commit."""

    @abc.abstractmethod
    def remember(self, keys: Collection[ParamKey] | None = None) -> None:
        """Save the sums that are present, or only those of `keys`, so that `restore` can bring them back."""

    @abc.abstractmethod
    def restore(
        self, taken: Collection[ParamKey], waiting: Collection[ParamKey], undone: Collection[ParamKey]
    ) -> None:
        """Bring back the sums that `remember` has saved, and discard all later ones.

        Args:
            taken: sums that commits since `remember` have taken, if these commits are not undone.
            waiting: sums that belong to updates that have still to be applied.
            undone: sums that belong to updates that are undone.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Discard the sums that `remember` has saved."""


def editable(gradients: GradientSink) -> EditableGradients:
    """Return `gradients` if a user's loop may edit them; otherwise raise.

    Raises:
        StreamError: if they are the gradients of several ranks in `train_step`.
    """
    if not isinstance(gradients, EditableGradients):
        raise StreamError(
            "with several ranks, the gradients of Engine.train_step cannot be replaced or undone",
            remedy="use one rank: num_csx 1",
        )
    return gradients


def consumed_error(name: str) -> StreamError:
    """Return the error for reading a gradient after `optimizer.step()` has consumed it."""
    return StreamError(
        "optimizer.step() has consumed this gradient; plain PyTorch would still have it",
        where=name,
        remedy="read it before optimizer.step(), and call zero_grad() before the next backward or step",
    )


def check_sparse(spec: ParamSpec, *, several_ranks: bool) -> None:
    """Raise if sparse gradients of a parameter cannot be summed.

    Raises:
        StreamError: if several ranks train, or the parameter was not known to have such gradients.
    """
    if several_ranks:
        raise StreamError(
            "expected a dense gradient with several ranks, got a sparse one",
            where=spec.name,
            remedy="build the embedding with sparse=False, or train on one rank",
        )
    if not spec.sparse_gradient and spec.numel > PIECE_ELEMENTS:
        raise StreamError(
            f"expected a dense gradient for a parameter of {spec.numel} elements, got a sparse one",
            where=spec.name,
            remedy="use nn.Embedding or nn.EmbeddingBag with sparse=True, which announce sparse gradients",
        )
