"""The schema of the older form, derived from that of the newer form with the tables that translate files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.config import forms
from headwater.config.base import JsonSchema, any_case
from headwater.config.origins import KeyPath
from headwater.config.releases import tables
from headwater.config.releases.models import MODEL as RULES_OF_MODELS
from headwater.config.releases.rules import Ignored, IgnoredWhere, Renamed, Replaced, Rule, Rules
from headwater.config.schema_tree import Keys, SchemaTree, without_effect

_INIT: KeyPath = ("trainer", "init")
_NAME = "older"
"""Suffix of the names of definitions that only the older form uses."""


def older_sections(tree: SchemaTree) -> dict[str, JsonSchema]:
    """Return the schema of each section of the older form."""
    rules_of_model = {
        key: rule for each in (*RULES_OF_MODELS.values(), tables.MODEL) for key, rule in each.items()
    }
    sections = {
        "train_input": _with_rules(tree, ("trainer", "fit", "train_dataloader"), tables.INPUT),
        "eval_input": _with_rules(tree, ("trainer", "validate", "val_dataloader"), tables.EVAL_INPUT),
        "model": _with_rules(tree, (*_INIT, "model"), rules_of_model, _moved(tree, forms.MODEL_KEYS)),
        "optimizer": _section(_optimizer(tree), tables.OPTIMIZER),
        "sparsity": _with_rules(tree, (*_INIT, "sparsity"), tables.SPARSITY),
        "runconfig": _section(_runconfig(tree), tables.RUNCONFIG),
    }
    return {**sections, **_by_rules(tables.TOP, {})}


def _moved(tree: SchemaTree, keys: dict[str, KeyPath]) -> dict[str, JsonSchema]:
    """Return key -> schema of the path below `trainer.init` that replaces this key in the newer form."""
    return {key: tree.at((*_INIT, *path)) for key, path in keys.items()}


def _runconfig(tree: SchemaTree) -> dict[str, JsonSchema]:
    states = (*_INIT, "callbacks", "LoadCheckpointStates", "load_checkpoint_states")
    return {
        **_moved(tree, forms.RUNCONFIG_KEYS),
        "checkpoint_path": tree.at(("trainer", "fit", "ckpt_path")),
        "load_checkpoint_states": tree.at(states),
    }


def _optimizer(tree: SchemaTree) -> dict[str, JsonSchema]:
    kinds = tree.resolve(tree.at((*_INIT, "optimizer")))["properties"]
    keys = _of_all(tree, kinds.values())
    schedule = _schedule(tree)
    rates = [keys["learning_rate"], schedule, {"type": "array", "items": schedule}]
    keys = {**keys, "learning_rate": {"anyOf": rates}}
    return {
        **keys,
        **{new: keys[old] for new, old in forms.OPTIMIZER_NAMES.items()},
        **_moved(tree, forms.OPTIMIZER_KEYS),
        **{key: {"type": "number"} for key in forms.BETAS},
        "optimizer_type": _name(kinds),
    }


def _schedule(tree: SchemaTree) -> JsonSchema:
    kinds = tree.resolve(tree.at((*_INIT, "schedulers")))["properties"]
    keys = _of_all(tree, kinds.values())
    return _section(
        {
            **keys,
            **{new: keys[old] for new, old in forms.SCHEDULE_NAMES.items()},
            **{
                key: {"description": why, "deprecated": True}
                for key, why in forms.IGNORED_OF_SCHEDULES.items()
            },
            "scheduler": _name((*kinds, *(name.removesuffix("LR") for name in kinds), *forms.SCHEDULES)),
        }
    )


def _of_all(tree: SchemaTree, kinds: Iterable[JsonSchema]) -> dict[str, JsonSchema]:
    """Return key -> schema for the keys of all `kinds` of a section. A key accepts the values of any kind."""
    found: dict[str, list[JsonSchema]] = {}
    for kind in kinds:
        for key, node in tree.resolve(kind)["properties"].items():
            if node not in found.setdefault(key, []):
                found[key].append(node)
    return {key: nodes[0] if len(nodes) == 1 else {"anyOf": nodes} for key, nodes in found.items()}


def _name(names: Iterable[str]) -> JsonSchema:
    return {"anyOf": [{"enum": sorted(set(names))}, {"type": "string", "pattern": any_case(names)}]}


def _section(keys: Keys, rules: Rules | None = None) -> JsonSchema:
    properties = {**keys, **_by_rules(rules or {}, keys)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _with_rules(tree: SchemaTree, path: KeyPath, rules: Rules, keys: Keys | None = None) -> JsonSchema:
    """Return the schema of a section of the older form, which also accepts the keys of older releases.

    Args:
        tree: the schema of the newer form.
        path: path of the section in the newer form.
        rules: rules for the keys of older releases.
        keys: schemas of further keys.
    """
    return tree.variant(tree.at(path), lambda known: {**(keys or {}), **_by_rules(rules, known)}, _NAME)


def _by_rules(rules: Rules, known: Keys) -> dict[str, JsonSchema]:
    return {key: _by_rule(rule, known, known.get(key)) for key, rule in rules.items()}


def _by_rule(rule: Rule, known: Keys, usual: JsonSchema | None) -> JsonSchema:
    """Return the schema of the values that a key had in older releases.

    Args:
        rule: the rule that translates the key.
        known: schemas of the keys of its section in the newest release.
        usual: schema of the same key in the newest release, if it exists.
    """
    match rule:
        case Renamed(name=str(name)):
            return known.get(name, {})
        case Ignored(why=why, only=only):
            values: dict[str, Any] = {"enum": list(only)} if only else {}
            return {**without_effect(why), **values}
        case IgnoredWhere(reasons=reasons):
            return {"anyOf": [{"enum": list(reasons)}, usual or {}]}
        case Replaced(meanings=meanings):
            return {"enum": list(meanings)}
        case _:
            return {}  # the key moves to another section
