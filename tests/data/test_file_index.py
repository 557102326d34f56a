"""Numbers of the samples of several files."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.data.file_index import FileIndex


@given(st.lists(st.integers(0, 4), max_size=8))
def test_samples_are_numbered_file_after_file(sizes):
    index = FileIndex(sizes)
    expected = [(file, place) for file, size in enumerate(sizes) for place in range(size)]
    assert [index.find(number) for number in range(len(index))] == expected
