"""The classes of the transformers library's auto-model mappings, each with its configuration and tasks."""

from __future__ import annotations

import dataclasses
import functools

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

_SUFFIX = "_MAPPING"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A class to walk.

    Attributes:
        class_name: name of the model class.
        model_type: the library's name for its architecture.
        tasks: the names of the mappings that list it: "causal lm", "image classification", …
    """

    class_name: str
    model_type: str
    tasks: tuple[str, ...]

    def model_class(self) -> type[PreTrainedModel]:
        """Return the class.

        Raises:
            AttributeError: if the library lists the class, but does not export it.
        """
        found: type[PreTrainedModel] = getattr(transformers, self.class_name)
        return found


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return every class of every mapping, once, by name."""
    tasks: dict[str, list[str]] = {}
    model_types: dict[str, str] = {}
    for attribute in sorted(vars(modeling_auto)):
        if not attribute.startswith("MODEL_") or not attribute.endswith(_SUFFIX):
            continue
        task = (
            attribute.removesuffix(_SUFFIX)
            .removeprefix("MODEL")
            .removeprefix("_FOR_")
            .lower()
            .replace("_", " ")
        )
        for model_type, names in getattr(modeling_auto, attribute)._model_mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, []).append(task or "base model")
                model_types.setdefault(name, model_type)
    return tuple(Entry(name, model_types[name], tuple(tasks[name])) for name in sorted(tasks))
