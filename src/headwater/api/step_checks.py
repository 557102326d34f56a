"""Checks of an optimizer's step before anything is committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwater.api.ranks import is_divided
from headwater.api.same_model import check_same_options
from headwater.api.stored_state import Optimizer, params_of
from headwater.core.errors import StreamError
from headwater.core.stage import ParamKey
from headwater.fabric.membership import current
from headwater.optim.catalog import takes_dense_gradients, takes_sparse_gradients
from headwater.store.gradients.port import consumed_error
from headwater.store.store import WeightStore
from headwater.stream.home import Home
from headwater.stream.parameters import ParameterAtRest


def check_ranks(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    """With several ranks, check that all make the same update, and that the batch was divided among them.

    Args:
        optimizer: the optimizer.
        options: the options of the step, which must be the same on all ranks.

    Raises:
        StreamError: if batches are not divided, if options differ between ranks, or if a parameter is trained
            that is not streamed.
    """
    if current().size == 1:
        return
    if not is_divided():
        raise StreamError(
            "no batch was divided among the ranks, so all of them computed the same gradient",
            where="optimizer.step()",
            remedy="take the batches from headwater.utils.data.DataExecutor(loader), or this rank's part of "
            "one from headwater.distributed.take_part(batch)",
        )
    names = {id(p): p.home.spec.name for p in params_of(optimizer) if isinstance(p, ParameterAtRest)}
    check_same_options(current(), optimizer, names, options)
    for param in params_of(optimizer):
        if not isinstance(param, ParameterAtRest) and param.grad is not None:
            raise StreamError(
                f"a trained parameter of shape {list(param.shape)} is not in a compiled model, so each rank "
                "would change a separate copy",
                where="optimizer.step()",
                remedy="make it a part of a model, and compile this model",
            )


def check_kinds(
    optimizer: Optimizer, store: WeightStore, options: Mapping[ParamKey, Mapping[str, Any]]
) -> None:
    """Check that the optimizer accepts the present gradients, sparse or dense.

    Args:
        optimizer: the optimizer.
        store: the store that has the gradients.
        options: the options of each parameter that the optimizer updates in this store.

    Raises:
        StreamError: if the optimizer does not accept one of these gradients.
    """
    name = type(optimizer).__name__
    for key in store.gradients.status.present.intersection(options):
        is_sparse = key in store.gradients.status.sparse
        if not (takes_sparse_gradients(name, options[key]) if is_sparse else takes_dense_gradients(name)):
            raise StreamError(
                f"{name} cannot use a {'sparse' if is_sparse else 'dense'} gradient with these options",
                where=store.spec(key).name,
                remedy="sparse gradients: SparseAdam, or SGD or Adagrad without momentum and weight decay; "
                "dense ones: any other optimizer",
            )


def check_not_consumed(homes: Iterable[Home]) -> None:
    """Check that no gradient was used by an earlier step and not zeroed since.

    Raises:
        StreamError: if a gradient was already used.
    """
    consumed = next((home for home in homes if home.gradient_is_consumed), None)
    if consumed is not None:
        raise consumed_error(consumed.spec.name)


def check_between_forwards(optimizer: Optimizer) -> None:
    """Check that no forward runs that uses parameters of an optimizer whose step begins.

    Raises:
        StreamError: if such a forward runs. Its weights are in use and must not be updated.
    """
    for param in params_of(optimizer):
        if hasattr(param, "home") and not isinstance(param, ParameterAtRest):
            raise StreamError(
                "an optimizer steps inside the forward of a module whose weights it updates",
                where=param.home.spec.name,
                remedy="call step() between forwards, for example after the call of each layer",
            )
