"""Conversion of the older form from older releases of the Cerebras Model Zoo to the newest release."""

from __future__ import annotations

import re

from headwater.config.document import Document, move, put
from headwater.config.origins import KeyPath, Origins
from headwater.config.releases import tables
from headwater.config.releases.models import update_model
from headwater.config.releases.rules import apply_rules
from headwater.core.errors import ConfigError

_SECTIONS = {
    (): tables.TOP,
    ("train_input",): tables.INPUT,
    ("eval_input",): tables.EVAL_INPUT,
    ("model",): tables.MODEL,
    ("optimizer",): tables.OPTIMIZER,
    ("runconfig",): tables.RUNCONFIG,
    ("sparsity",): tables.SPARSITY,
}


def update_release(document: Document) -> Document:
    """Return `document`, which has the older form of any release, with the keys of the newest release.

    Raises:
        ConfigError: if a key of an older release has a value that is not supported.
    """
    # First: a model_name is that of the policy, but the rules would make it the name of the whole model.
    document = _nest_policy(document)
    for section, rules in _SECTIONS.items():
        document = apply_rules(document, section, rules)
    return _name_filters(update_model(document))


_BESIDE_POLICY = (
    "name", "dpo", "compute_eval_metrics", "mixed_precision", "fp16_type", "use_bfloat16",
    "precision_opt_level",
)  # fmt: skip


def _nest_policy(document: Document) -> Document:
    """Return `document` with the policy's keys of a `dpo` model moved into a section `policy_model`."""
    model = document.get(("model",))
    if not isinstance(model, dict) or "dpo" not in model or "policy_model" in model:
        return document
    names = {key: "name" if key == "model_name" else key for key in model if key not in _BESIDE_POLICY}
    above = document.origins.at(("model",))
    inside = {name: above.at((key,)) for key, name in names.items()}
    rest = {key: value for key, value in model.items() if key in _BESIDE_POLICY}
    policy = {name: model[key] for key, name in names.items()}
    beside = Origins(above.here, {key: above.at((key,)) for key in rest})
    document = put(document, ("model",), rest, beside)
    document = put(document, ("model", "policy_model"), policy, Origins(above.here, inside))
    return apply_rules(document, ("model", "policy_model"), tables.MODEL)


def _name_filters(document: Document) -> Document:
    """Return `document` with `param_name_patterns` (regular expressions) converted to `param_filter`."""
    old: KeyPath = ("sparsity", "param_name_patterns")
    given = document.get(old)
    if given is None:
        return document
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(
            f"expected regular expressions in param_name_patterns, found {given!r}",
            where=str(document.origin(old)),
            remedy="write param_filter, a list of patterns such as '*proj_q_dense_layer.weight'",
        )
    origin = document.origin(old)
    filters = [_filter(pattern, str(origin)) for pattern in patterns]
    new: KeyPath = ("sparsity", "param_filter")
    return put(move(document, old, new), new, filters, origin)


def _filter(pattern: str, where: str) -> str:
    """Convert a regular expression to a pattern with `*` that matches the same names.

    Args:
        pattern: the regular expression.
        where: place for the error.

    Raises:
        ConfigError: if there is no such pattern.
    """
    simple = pattern.removesuffix("$").replace(".*", "*")
    if not re.fullmatch(r"[\w.*\[\]]*", simple):
        raise ConfigError(
            f"the regular expression {pattern!r} cannot be converted to a pattern with *",
            where=where,
            remedy="write param_filter, a list of patterns such as '*proj_q_dense_layer.weight'",
        )
    return simple
