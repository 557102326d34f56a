"""Decisions about checkpoints that need only their names, and the state of a run as two files."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import CorruptError, DataError
from headwater.trainer.checkpoint_names import folder_of, is_checkpoint, set_aside_names, step_of, surplus
from headwater.trainer.checkpoint_state import STATE_FILE, STATE_TENSORS_FILE, pack_state, unpack_state

FOLDER = Path("run")


@pytest.mark.parametrize("step", [0, 7, 12_000_000])
def test_the_name_of_a_checkpoint_has_its_step(step):
    path = folder_of(FOLDER, step)
    assert path.name == f"checkpoint_{step}"
    assert is_checkpoint(path) and step_of(path) == step


@pytest.mark.parametrize("name", ["checkpoint_", "checkpoint_3.partial", "checkpoint_-1", "my_checkpoint_3"])
def test_other_names_are_not_those_of_checkpoints(name):
    assert not is_checkpoint(FOLDER / name)


def test_checkpoints_that_were_set_aside_get_different_names():
    names = list(itertools.islice(set_aside_names(FOLDER / "checkpoint_3"), 20))
    assert names[0] == FOLDER / "checkpoint_3.superseded"
    assert len(set(names)) == 20 and not any(map(is_checkpoint, names))


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(1, 8), st.data())
def test_the_checkpoint_written_last_and_the_newest_others_are_kept(steps, keep_n, data):
    complete = [folder_of(FOLDER, step) for step in sorted(steps)]
    written = data.draw(st.sampled_from(complete))
    deleted = surplus(complete, written, keep_n)
    kept = [path for path in complete if path not in deleted]
    assert written in kept and len(kept) == min(keep_n, len(complete))
    others = [step_of(path) for path in kept if path != written]
    assert not deleted or not others or max(map(step_of, deleted)) < min(others)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
TREES = st.dictionaries(
    st.text(),
    st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10),
)


def state_of(files):
    return unpack_state(files[STATE_FILE], files[STATE_TENSORS_FILE], where="checkpoint_3/trainer.json")


@given(TREES)
def test_a_tree_is_read_as_it_was_written(tree):
    assert state_of(pack_state(tree)) == tree


def test_tensors_in_a_tree_keep_their_bits():
    shared = torch.randn(4, 6)
    state = {"a": [shared, {"b": shared.T}], "c": torch.tensor(float("nan")), "d": torch.arange(3)[::2]}
    found = state_of(pack_state(state))
    pairs = [
        (found["a"][0], shared),
        (found["a"][1]["b"], shared.T),
        (found["c"], state["c"]),
        (found["d"], state["d"]),
    ]
    for read, written in pairs:
        assert read.dtype == written.dtype
        assert torch.equal(read.nan_to_num(7.0), written.nan_to_num(7.0))


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_tensor_that_no_file_can_hold_is_an_error_that_names_its_place(tensor):
    with pytest.raises(DataError, match="expected the state of the run to have dense tensors") as caught:
        pack_state({"loader": [1, tensor]})
    assert caught.value.where == "state/loader/1"


@pytest.mark.parametrize("tree", [b"", b"[1]", b"{", b'{"a": {"__tensor__": "b"}}', b"\xff"])
def test_a_damaged_tree_is_an_error_that_names_the_file(tree):
    tensors = pack_state({})[STATE_TENSORS_FILE]
    with pytest.raises(CorruptError) as caught:
        unpack_state(tree, tensors, where="checkpoint_3/trainer.json")
    assert caught.value.where == "checkpoint_3/trainer.json"
