"""Similar names, for error messages."""

from headwater.core.names import nearest, nearest_sibling


def test_most_similar_name_in_any_case():
    assert nearest("adamv", ["SGD", "AdamW", "Adamax"]) == "AdamW"
    assert nearest("xyz", ["SGD", "AdamW"]) is None
    assert nearest("a" * 1_000_000, ["SGD"]) is None


def test_sibling_with_a_similar_name(tmp_path):
    (tmp_path / "samples").mkdir()
    assert nearest_sibling(tmp_path / "sample") == tmp_path / "samples"
    assert nearest_sibling(tmp_path / "other") is None
    assert nearest_sibling(tmp_path / "missing" / "samples") is None
