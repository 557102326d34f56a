"""Operators that a dry run computes with real values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headwater.core.errors import StreamError
from headwater.plan.stand_ins import Operators


class Counted:
    """An operator that counts its calls on real tensors."""

    def __init__(self, func):
        self._func = func
        self.num_real = 0

    def __getattr__(self, name):
        return getattr(self._func, name)

    def __call__(self, *args, **kwargs):
        self.num_real += not any(isinstance(arg, FakeTensor) for arg in args)
        return self._func(*args, **kwargs)


@pytest.mark.parametrize(("length", "computed"), [(64, 1), (2048, 0)])
def test_a_mask_is_computed_only_if_it_is_small(length, computed):
    operators, compare = Operators(), Counted(torch.ops.aten.ge.Tensor)
    positions = torch.arange(length)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(positions)
    operators.know(fake, positions)
    with mode:
        rows, columns = (operators.call(torch.ops.aten.unsqueeze.default, (fake, dim), {}) for dim in (1, 0))
        mask = operators.call(compare, (rows, columns), {})
    assert mask.shape == (length, length)
    assert compare.num_real == computed


def test_a_loop_that_no_made_up_value_ends_is_an_error():
    operators, item = Operators(), torch.ops.aten._local_scalar_dense.default
    with FakeTensorMode():
        unknown = torch.empty(())

        def read(times):
            for _ in range(times):
                operators.call(torch.ops.aten.add.Tensor, (unknown, unknown), {})
                operators.call(item, (unknown,), {})

        read(600)
        with operators.module_call():
            read(600)
        read(399)
        for _ in range(2000):  # as `tolist` does
            operators.call(item, (unknown,), {})
        with pytest.raises(StreamError, match="loop"):
            read(1)


def test_a_loop_whose_condition_is_a_module_is_an_error():
    operators, item = Operators(), torch.ops.aten._local_scalar_dense.default
    with FakeTensorMode():
        unknown = torch.empty(())

        def condition():
            with operators.module_call():
                operators.call(torch.ops.aten.add.Tensor, (unknown, unknown), {})
                operators.call(item, (unknown,), {})

        for _ in range(1000):
            condition()
        with pytest.raises(StreamError, match="loop"):
            condition()
