"""Mappings that behave as a `dict` with entries elsewhere, compared with a `defaultdict`."""

import copy
from collections import defaultdict

import pytest

from headwater.api.dictionary import Dictionary


class Elsewhere(Dictionary):
    """A dictionary whose entries are in another one; reading a missing key creates it."""

    def __init__(self, entries):
        self.entries = defaultdict(list, entries)

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)

    def __contains__(self, key):
        return key in self.entries

    def copy(self):
        return self.entries.copy()


def merge_in_place(mapping):
    mapping |= {"b": 3, "c": 4}
    return dict(mapping)


USES = {
    "get": lambda d: (d.get("a"), d.get("none"), d.get("none", 7), dict(d)),
    "pop": lambda d: (d.pop("a"), d.pop("none", 7), dict(d)),
    "pop without default": lambda d: d.pop("none"),
    "setdefault": lambda d: (d.setdefault("a", 9), d.setdefault("new", 9), dict(d)),
    "clear": lambda d: (d.clear(), len(d), dict(d)),
    "or": lambda d: d | {"b": 3},
    "reflected or": lambda d: {"b": 3, "z": 1} | d,
    "or of two": lambda d: d | copy.copy(d),
    "or in place": merge_in_place,
    "reversed": lambda d: list(reversed(d)),
    "update": lambda d: (d.update(a=5), dict(d)),
    "missing key": lambda d: (d["missing"], dict(d)),
    "isinstance": lambda d: isinstance(d, dict),
}


def outcome(use, mapping):
    try:
        return use(mapping)
    except KeyError as error:
        return repr(error)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_dictionary_behaves_as_a_defaultdict(use):
    entries = {"a": 1, "b": 2}
    assert outcome(use, Elsewhere(entries)) == outcome(use, defaultdict(list, entries))


def test_the_storage_of_the_dict_itself_stays_empty():
    mapping = Elsewhere({"a": 1})
    mapping |= {"b": 2}
    mapping.setdefault("c", 3)
    assert dict.__len__(mapping) == 0
