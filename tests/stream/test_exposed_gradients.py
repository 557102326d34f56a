"""Gradients of parameters on an accelerator behave as tensors on it, and changes of them reach the host."""

import copy
import gc

import pytest
import torch
from tests.fake_cuda import META, OnFakeCuda, fake_cuda

from headwater.stream.exposed_gradients import exposed_on


@pytest.fixture(autouse=True)
def gpu():
    with fake_cuda():
        yield


def gradient():
    host = torch.arange(6.0).reshape(2, 3)
    return host, exposed_on(META, host)


def test_the_fake_gpu_refuses_host_tensors():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="meta").add_(torch.ones(3))


def test_a_gradient_has_the_device_of_its_parameter():
    host, exposed = gradient()
    assert exposed.device == META and exposed.shape == host.shape and exposed.dtype == host.dtype
    assert exposed_on(torch.device("cpu"), host) is host


def test_a_loop_computes_with_parameters_and_gradients():
    _, exposed = gradient()
    param = torch.ones(2, 3, device="meta")
    param.add_(exposed, alpha=-0.5)
    assert param.tolist() == [[1.0, 0.5, 0.0], [-0.5, -1.0, -1.5]]
    assert isinstance(torch.zeros_like(exposed), OnFakeCuda)
    assert isinstance(exposed * 2, OnFakeCuda)
    assert exposed.cpu().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.mul_(2),
        lambda grad: grad.add_(grad),
        lambda grad: grad.add_(grad.clone()),
        lambda grad: grad.data.mul_(2),
        lambda grad: grad.detach().mul_(2),
        lambda grad: grad.view(-1).mul_(2),
        lambda grad: [row.mul_(2) for row in grad.unbind(0)],
        lambda grad: grad.copy_(2 * grad),
        lambda grad: torch.mul(grad, 2, out=grad),
        lambda grad: torch._foreach_mul_([grad], 2),
        lambda grad: grad.__setitem__(slice(None), 2 * grad),
    ],
    ids=range(11),
)
def test_changes_in_place_reach_the_host(change):
    host, exposed = gradient()
    change(exposed)
    assert host.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_operations_return_the_gradient_that_they_change():
    _, exposed = gradient()
    assert exposed.mul_(2) is exposed


def test_clipping_by_norm_changes_the_gradients_of_the_host():
    host, exposed = gradient()
    plain = torch.nn.Parameter(torch.zeros(2, 3))
    plain.grad = host.clone()
    wanted = torch.nn.utils.clip_grad_norm_([plain], 1.0)
    param = type("Param", (), {"grad": exposed})()
    norm = torch.nn.utils.clip_grad_norm_([param], 1.0, foreach=False)
    assert norm.tolist() == wanted.tolist()
    assert torch.equal(host, plain.grad)


def test_copies_are_plain_tensors():
    host, exposed = gradient()
    copied = copy.deepcopy(exposed)
    copied.zero_()
    assert type(copied) is OnFakeCuda and host.tolist()[1] == [3.0, 4.0, 5.0]
    assert exposed.tolist() == host.tolist()
    assert exposed.sum().item() == 15.0


def test_an_exposed_gradient_stays_one_object_and_keeps_no_memory_alive():
    host, exposed = gradient()
    assert exposed_on(META, host) is exposed
    first = id(exposed.host)
    del exposed
    gc.collect()
    assert host.exposed() is None and id(exposed_on(META, host).host) == first
