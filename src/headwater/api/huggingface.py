"""Names, conversions, ties and optional tensors of a model's checkpoints, as transformers defines them.

Every function takes any module. For a module that is not a transformers model, the names in a checkpoint are
those of its `state_dict`. Tensors stay lazy: conversions (merged experts, split projections) are computed
when the tensor is read.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.core.initialization import is_transformers_model
from headwater.core.lazy import LazyTensor

Tensors = Mapping[str, Tensor]


def named_by_model(model: Any, tensors: Tensors, own: Iterable[str]) -> dict[str, Tensor]:
    """Rename and convert the tensors of a checkpoint to those of the model, as `from_pretrained` does.

    Args:
        model: the model.
        tensors: the tensors of the checkpoint, by their names there.
        own: the names in the model's `state_dict`.
    """
    if not is_transformers_model(model):
        return dict(tensors)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    own = dict.fromkeys(own, True)
    transforms = get_model_conversion_mapping(model)
    renamings, converters = _by_kind(transforms)
    groups = _Groups(model, converters)
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        # A renaming for old checkpoints also matches some names that the model really has.
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, own)
        groups.add(name, key, pattern if name in own else None, tensors[key])
    model._weight_conversions = [t for t in transforms if t.was_used()]  # `save_pretrained` reverts these
    return groups.results()


def named_by_checkpoint(model: Any, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a model with the names and shapes of `save_pretrained` (see `named_by_model`)."""
    if not is_transformers_model(model):
        return dict(tensors)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, dot_natural_key, rename_source_key

    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # no checkpoint was loaded: add no prefix that only some checkpoints have
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [t for t in transforms if not isinstance(t, PrefixChange)]
    if not transforms:
        return dict(tensors)
    renamings, converters = _by_kind([t.reverse_transform() for t in reversed(transforms)])
    groups = _Groups(model, converters)
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, [], converters)
        groups.add(name, key, pattern, tensors[key])
    return {rename_source_key(n, renamings, [])[0]: tensor for n, tensor in groups.results().items()}


def _by_kind(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, WeightConverter)]


class _Source(NamedTuple):
    """A tensor with its old name, and the pattern by which a converter accepts it."""

    key: str
    pattern: str | None
    tensor: Tensor


@dataclasses.dataclass
class _Group:
    """Tensors that one converter combines or splits, or a single tensor that is only renamed."""

    converter: Any
    sources: list[_Source]


class _Groups:
    """Tensors to be renamed or converted, grouped by their first new name."""

    def __init__(self, model: Any, converters: Iterable[Any]) -> None:
        self._model = model
        self._converter_of = {p: converter for converter in converters for p in converter.source_patterns}
        self._groups: dict[str, _Group] = {}

    def add(self, name: str, key: str, pattern: str | None, tensor: Tensor) -> None:
        """Add a tensor that will be renamed or converted.

        Args:
            name: the new name.
            key: the old name.
            pattern: selects the converter; `None` if the tensor is not converted.
            tensor: the tensor.
        """
        converter = None if pattern is None else self._converter_of[pattern]
        self._groups.setdefault(name, _Group(converter, [])).sources.append(_Source(key, pattern, tensor))

    def results(self) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for name, group in self._groups.items():
            if group.converter is None:
                results[name] = group.sources[0].tensor
            else:
                results |= self._converted(name, group)
        return results

    def _converted(self, name: str, group: _Group) -> dict[str, Tensor]:
        """Return the converted tensors of a group. They are lazy: each is computed when it is read."""

        def convert(form: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            # A converter keeps the tensors that it gets, and each result is converted by itself.
            converter = copy.deepcopy(group.converter)
            for source in group.sources:
                converter.add_tensor(name, source.key, source.pattern, form(source.tensor))
            made = converter.convert(name, model=self._model, config=self._model.config)
            return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

        def lazy(key: str, outline: Tensor) -> LazyTensor:
            # The tensors are cloned, because every operation of the converter would read a lazy tensor again.
            return LazyTensor.whole(lambda: convert(torch.clone)[key], outline.shape, outline.dtype)

        outlines = convert(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        return {key: lazy(key, outline) for key, outline in outlines.items()}


def without_ignored(model: Any, missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected names, without those that the model ignores.

    Args:
        model: the model.
        missing: names that only the model has.
        unexpected: names that only the checkpoint has.
    """
    if not is_transformers_model(model):
        return missing, unexpected
    names = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(names)
    return names.missing_keys, names.unexpected_keys


def names_to_save(model: nn.Module, groups: Iterable[list[str]]) -> list[str]:
    """Return the names of the tensors that are to be saved in a checkpoint.

    If the model declares the names of a tensor as tied, at least one of them is kept. Ties that the model
    does not declare would be lost when the checkpoint is loaded, so all of their names are kept.

    Args:
        model: the model.
        groups: the names of each tensor.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    kept = []
    for group in groups:
        names = [name for name in group if name not in ignored]
        declared = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in tied)]
        # One name stays, even if the model declares all of them as tied.
        kept += [name for name in names if name not in declared[: len(names) - 1]]
    return kept


def save_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write `config.json`, and the generation config if the model has one, as `save_pretrained` does.

    Args:
        model: the model; nothing is written if it is not a transformers model.
        directory: the folder, which exists.
        dtype: the dtype of the floating-point weights in the checkpoint.
    """
    if not is_transformers_model(model):
        return
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]  # by which `Auto` classes find the model's class
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
