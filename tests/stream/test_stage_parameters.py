"""The parameters of one stage: bound to an image, at rest, and plain again."""

import pytest
import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.stream.binding import Binder
from headwater.stream.parameters import ParameterAtRest


class Setup:
    """A model of two layers, a store with zeros, and a binder of both stages."""

    def __init__(self, **options):
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        params = [
            ParamSpec(name, tuple(param.shape), torch.float32, torch.float32)
            for name, param in self.model.named_parameters()
        ]
        stages = [
            StageSpec(index, str(index), tuple(params[2 * index : 2 * index + 2])) for index in range(2)
        ]
        rule = UpdateRule(OptimizerSpec("SGD", {"lr": 1.0}))
        self.store = build_store(stages, rule, lambda own: MemoryTier(own.layouts))
        self.binder = Binder(self.model, self.store, torch.device("cpu"), **options)
        for stage in range(2):
            self.store.parameters.write(stage, lambda piece: piece.master.zero_())
            self.binder.adopt(stage)
        self.images = [torch.zeros(stage.slab_bytes, dtype=torch.uint8) for stage in stages]

    @property
    def first(self):
        return self.binder.stages[0]


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.store.close()


def test_parameters_at_rest_have_the_values_of_the_store(setup):
    weight = setup.model[0].weight
    assert type(weight) is ParameterAtRest
    assert torch.equal(weight.clone(), torch.zeros(2, 3))


def test_bound_parameters_are_plain_views_of_the_image(setup):
    setup.images[0][:24].view(torch.float32).fill_(5)
    setup.binder.bind(0, setup.images.__getitem__)
    weight = setup.model[0].weight
    assert type(weight) is nn.Parameter and torch.equal(weight.data, torch.full((2, 3), 5.0))
    assert weight.data_ptr() == setup.images[0].data_ptr()
    assert not setup.binder.stages[1].is_bound


def test_a_bound_stage_is_not_fetched_again(setup):
    setup.binder.bind(0, setup.images.__getitem__)
    setup.binder.bind(0, lambda stage: pytest.fail("it is bound"))
    setup.binder.unbind_all()
    assert not setup.first.is_bound


def test_unbound_parameters_hold_no_memory_of_the_image(setup):
    setup.binder.bind(0, setup.images.__getitem__)
    setup.first.unbind()
    with torch._C.DisableTorchFunctionSubclass():
        assert setup.model[0].weight.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("stable", [False, True])
def test_parameters_at_rest_keep_their_memory_for_saved_tensors_until_they_are_unbound(stable):
    setup = Setup(stable=stable)
    setup.binder.bind(0, setup.images.__getitem__)
    setup.first.put_at_rest()

    def address():
        with torch._C.DisableTorchFunctionSubclass():
            return setup.model[0].weight.data_ptr()

    assert address() == setup.images[0].data_ptr()
    setup.binder.unbind_all()
    assert (address() == setup.images[0].data_ptr()) is stable
    setup.store.close()


def test_a_handle_names_the_parameter_and_fails_after_a_change(setup):
    setup.binder.bind(0, setup.images.__getitem__)
    weight, bias = setup.model[0].weight, setup.model[0].bias
    handle = setup.binder.handle_of(bias.data)
    assert (handle.stage, handle.param, handle.shape) == (0, 1, (2,))
    assert setup.binder.handle_of(weight.data[1:]).storage_offset == 3
    assert setup.binder.handle_of(torch.zeros(2)) is None
    setup.first.check_unchanged(handle)
    with torch.no_grad():
        bias.add_(0)
    with pytest.raises(StreamError, match="changed in place"):
        setup.first.check_unchanged(handle)


def test_a_write_that_the_dry_run_did_not_see_is_refused(setup):
    setup.binder.bind(0, setup.images.__getitem__)
    with torch.no_grad():
        setup.model[0].bias.add_(1)
    with pytest.raises(StreamError, match="did not change in the dry run"):
        setup.first.unbind()
    assert type(setup.model[0].bias) is ParameterAtRest


def test_a_write_that_the_dry_run_saw_reaches_the_store():
    setup = Setup(written={"0.bias"})
    setup.binder.bind(0, setup.images.__getitem__)
    setup.model[0].bias.data = torch.full((2,), 3.0)  # other memory
    setup.first.unbind()
    assert torch.equal(setup.store.parameters.read_param((0, 1)), torch.full((2,), 3.0))
    setup.store.close()


def test_a_parameter_that_leaves_is_plain_and_a_dummy_replaces_it(setup):
    bias = setup.model[0].bias
    setup.store.parameters.write_param((0, 1), torch.full((2,), 7.0))
    bias.home.leave(torch.device("cpu"))
    assert type(bias) is nn.Parameter and torch.equal(bias.data, torch.full((2,), 7.0))
    assert setup.binder.departed == {(0, 1): bias}
    assert setup.first.params[1] is not bias
    setup.binder.bind(0, setup.images.__getitem__)  # binds the dummy
    assert torch.equal(bias.data, torch.full((2,), 7.0))


def test_released_parameters_are_plain_and_hold_nan(setup):
    setup.binder.bind(0, setup.images.__getitem__)
    setup.binder.release()
    for param in setup.model.parameters():
        assert type(param) is nn.Parameter and bool(param.isnan().all()) and not hasattr(param, "home")


def test_a_parameter_is_streamed_by_one_model_only(setup):
    with pytest.raises(StreamError, match="another compiled model"):
        Binder(setup.model, setup.store, torch.device("cpu")).adopt(0)
