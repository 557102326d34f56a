"""Rules for keys of older releases."""

import pytest

from headwater.config.document import Document
from headwater.config.origins import Origin, Origins
from headwater.config.releases.rules import Ignored, IgnoredWhere, Renamed, Replaced, apply_rules
from headwater.core.errors import ConfigError


def converted(rule, **section):
    document = Document({"model": section}, Origins(Origin("file", ())))
    result = apply_rules(document, ("model",), {"old": rule})
    return result.tree["model"], result.notices


def test_renamed_key_keeps_its_value():
    assert converted(Renamed("new"), old=1, other=2) == ({"new": 1, "other": 2}, ())
    assert converted(Renamed("new"), old=1, new=1) == ({"new": 1}, ())
    with pytest.raises(ConfigError, match=r"(?s)model.old and model.new have the same meaning.*remove old"):
        converted(Renamed("new"), old=1, new=2)


def test_ignored_key_is_removed_with_a_notice():
    assert converted(Ignored("it is a comment"), old="x") == (
        {},
        ("file: model.old has no effect: it is a comment",),
    )
    with pytest.raises(ConfigError, match="expected old: true, found false, which is not supported"):
        converted(Ignored("always so", only=(True,)), old=False)
    with pytest.raises(ConfigError, match="expected old: true, found 1"):
        converted(Ignored("always so", only=(True,)), old=1)


def test_key_ignored_with_some_values_is_kept_with_others():
    rule = IgnoredWhere({"auto": "the plan chooses it"})
    assert converted(rule, old=4) == ({"old": 4}, ())
    assert converted(rule, old="auto")[0] == {}


def test_replaced_value():
    rule = Replaced({True: ("norm", "rms"), False: None})
    assert converted(rule, old=True)[0] == {"norm": "rms"}
    assert converted(rule, old=True, norm="rms")[0] == {"norm": "rms"}
    assert converted(rule, old=False)[0] == {}
    with pytest.raises(ConfigError, match="expected old: true or false, found 'x'"):
        converted(rule, old="x")
    with pytest.raises(ConfigError, match="the same meaning, but different values"):
        converted(rule, old=True, norm="layer")
