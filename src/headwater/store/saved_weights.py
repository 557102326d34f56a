"""Weights of a whole model in safetensors files, matched by name with the parameters of a store."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch

from headwater.core.errors import FROM_WEIGHTS, CheckpointError
from headwater.core.safetensors import Run, TensorFile
from headwater.core.stage import MAY_BE_MISSING, ParamSpec, StageSpec

Buffers = Mapping[str, torch.Tensor]
"""Name -> buffer of the model. Loading overwrites the buffers in place."""

Names = Callable[[str], Sequence[str]]
"""Returns the possible names of a parameter in files from its name in the model, the preferred one first.

If the last name is `MAY_BE_MISSING`, the parameter may be missing in the files, and then keeps its value.
"""

_OTHER_MODEL = (
    f"write the model's section as it was when these weights were trained; for another task, {FROM_WEIGHTS}"
)


@final
class SavedWeights:
    """Weights of a whole model in files, checked against the model's stages before any of them is read.

    Args:
        files: the files.
        stages: the stages that they fill.
        buffers: tensors of the model that are not parameters.
        exact: require the dtypes of the masters.
        strict: refuse missing and unknown parameters and buffers.
        names: returns the names of a parameter in the files.
    """

    def __init__(
        self,
        files: Sequence[TensorFile],
        stages: Sequence[StageSpec],
        buffers: Buffers,
        *,
        exact: bool,
        strict: bool,
        names: Names = lambda name: (name,),
    ) -> None:
        self._names = names
        self._files = {name: file for file in files for name in file.places}
        self._where = str(files[0].path.parent)
        self._exact = exact
        wanted = [ParamSpec(n, tuple(b.shape), b.dtype, b.dtype) for n, b in buffers.items()]
        wanted += [spec for stage in stages for spec in stage.params]
        self._saved_names = self._match(wanted)
        if strict:
            # All checks come before the first read, so a refused file changes nothing.
            self._refuse_missing(wanted)
            self._refuse_unknown(wanted)
        for spec in wanted:
            if spec.name in self:
                self._check(spec)

    def __contains__(self, name: str) -> bool:
        return name in self._saved_names

    def run(self, name: str, start: int, count: int) -> Run:
        """Return a run of `count` elements of a parameter or buffer that begins with its element `start`.

        Args:
            name: its name in the model.
            start: the first element.
            count: number of elements.
        """
        saved = self._saved_names[name]
        return self._files[saved], saved, start, count

    def _match(self, wanted: Iterable[ParamSpec]) -> dict[str, str]:
        """Return name in the model -> name in the files, for each of `wanted` that the files hold."""
        found = {spec.name: [n for n in self._candidates(spec) if n in self._files] for spec in wanted}
        return {name: names[0] for name, names in found.items() if names}

    def _candidates(self, spec: ParamSpec) -> list[str]:
        return [name for own in (spec.name, *spec.aliases) for name in self._names(own)]

    def _refuse_missing(self, wanted: Iterable[ParamSpec]) -> None:
        for spec in wanted:
            if spec.name not in self and MAY_BE_MISSING not in self._candidates(spec):
                raise CheckpointError(
                    f"{spec.name} is missing; {_nearest(spec.name, self._files, 'the files hold')}",
                    where=self._where,
                    remedy=_OTHER_MODEL,
                )

    def _refuse_unknown(self, wanted: Iterable[ParamSpec]) -> None:
        known = {name for spec in wanted for name in self._candidates(spec)}
        for name, file in self._files.items():
            if name not in known:
                raise CheckpointError(
                    f"the model has no {name}; {_nearest(name, known, 'it has')}",
                    where=str(file.path),
                    remedy=_OTHER_MODEL,
                )

    def _check(self, spec: ParamSpec) -> None:
        saved = self._saved_names[spec.name]
        file = self._files[saved]
        place = file.places[saved]
        if place.shape != spec.shape:
            raise CheckpointError(
                f"{spec.name} has shape {place.shape} in the file and {spec.shape} in the model",
                where=str(file.path),
                remedy=_OTHER_MODEL,
            )
        if place.dtype != spec.dtype and (self._exact or not place.dtype.is_floating_point):
            raise CheckpointError(
                f"{spec.name} is {place.dtype} in the file and {spec.dtype} in the model",
                where=str(file.path),
                remedy="save the weights in the model's own dtype",
            )


def _nearest(name: str, names: Iterable[str], intro: str) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"{intro} {', '.join(close)}" if close else "no name is similar"
