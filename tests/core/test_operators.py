"""Arguments of torch's operators: their values in a call, and those that are changed in place."""

import pytest
import torch

from headwater.core.operators import argument_values, written_arguments

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        (aten.add.Tensor, ()),
        (aten.view.default, ()),  # its result is a view of an argument, which it does not change
        (aten.add_.Tensor, ("self",)),
        (aten.add.out, ("out",)),
        (aten._fused_sgd_.default, ("self", "grads", "momentum_buffer_list")),
    ],
)
def test_written_arguments_are_those_of_the_schema(operator, names):
    assert written_arguments(operator) == names


def test_values_of_arguments_are_found_by_position_and_by_name():
    names = ("self", "other", "alpha", "out")
    assert argument_values(names, aten.add.out, (1, 2), {"out": 3}) == [1, 2, None, 3]
    assert argument_values((), aten.add.out, (1, 2), {"out": 3}) == []
