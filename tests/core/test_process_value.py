"""A value that the whole process shares."""

import pytest

from headwater.core.process_value import ProcessValue


def test_a_replaced_value_returns_also_after_an_error():
    shared = ProcessValue[int | None](None)
    with pytest.raises(KeyError), shared.replaced(1):
        with shared.replaced(2):
            assert shared.value == 2
        assert shared.value == 1
        raise KeyError
    assert shared.value is None
