"""The fused cross-entropy compared with `F.cross_entropy`, and its memory."""

import threading

import pytest
import torch
from tests.fake_cuda import OnFakeCuda, fake_cuda
from tests.plain_loss import plain_cross_entropy
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.models import loss as loss_module
from headwater.models.loss import linear_cross_entropy


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest storage that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.element_size())
        return result


def problem(rows=37, width=16, vocab=101, dtype=torch.float32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    return (
        normal(rows, width),
        normal(vocab, width),
        normal(vocab) if bias else None,
        torch.randint(0, vocab, (rows,), generator=generator),
        torch.rand(rows, generator=generator) / rows,
    )


def gradients(function, arguments, **kwargs):
    leaves = [None if a is None else a.detach().requires_grad_() for a in arguments[:3]]
    loss = function(*leaves, *arguments[3:], **kwargs)
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves if leaf is not None]


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 36, 37, 1000])
def test_equals_cross_entropy_in_fp32(chunk_rows, bias):
    arguments = problem(bias=bias)

    def oracle(hidden, weight, offset, targets, row_weights):
        return (
            F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction="none") * row_weights
        ).sum()

    loss, grads = gradients(linear_cross_entropy, arguments, chunk_rows=chunk_rows)
    expected, expected_grads = gradients(oracle, arguments)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 1e-6


def test_gradcheck_in_fp64():
    arguments = problem(rows=5, width=3, vocab=7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, b, arguments[3], arguments[4].double(), chunk_rows=2) * 3,
        arguments[:3],
    )


def test_softmax_blocks_do_not_change_the_result(monkeypatch):
    arguments = problem()
    expected = gradients(linear_cross_entropy, arguments)
    monkeypatch.setattr(loss_module, "_BLOCK_BYTES", 4 * 128 * 3)
    actual = gradients(linear_cross_entropy, arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_targets_of_rows_with_weight_zero_are_ignored():
    hidden, weight, bias, targets, row_weights = problem()
    row_weights[::3] = 0
    keep = row_weights != 0
    bad = targets.masked_fill(~keep, -100)
    loss, (grad_hidden, *rest) = gradients(linear_cross_entropy, (hidden, weight, bias, bad, row_weights))
    shorter = (hidden[keep], weight, bias, targets[keep], row_weights[keep])
    expected, (expected_hidden, *expected_rest) = gradients(plain_cross_entropy, shorter)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad_hidden[keep], expected_hidden)
    assert not grad_hidden[~keep].any()
    torch.testing.assert_close(rest, expected_rest)


def test_without_rows_the_loss_and_all_gradients_are_zero():
    loss, grads = gradients(linear_cross_entropy, problem(rows=0))
    assert loss == 0
    assert not any(grad.any() for grad in grads)


def test_large_logits_do_not_overflow():
    hidden, weight, bias, targets, row_weights = problem()
    arguments = (hidden.detach() * 1e3, weight, bias, targets, row_weights)
    loss, grads = gradients(linear_cross_entropy, arguments)
    expected, expected_grads = gradients(plain_cross_entropy, arguments)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_plain_pytorch(dtype):
    arguments = problem(rows=64, width=32, vocab=300, dtype=dtype)
    wide = [a.detach().float() if a is not None and a.is_floating_point() else a for a in arguments]
    expected, expected_grads = gradients(plain_cross_entropy, wide)
    _, plain_grads = gradients(plain_cross_entropy, arguments)
    loss, grads = gradients(linear_cross_entropy, arguments)
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < torch.finfo(dtype).eps * expected
    for grad, plain_grad, expected_grad in zip(grads, plain_grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        assert relative_error(grad, expected_grad) < 1.5 * relative_error(plain_grad, expected_grad) + 1e-4


def test_fp16_gradients_of_many_tokens_do_not_underflow():
    hidden, weight, bias, targets, _ = problem(rows=8, vocab=5000, dtype=torch.float16)
    tiny = torch.full((8,), 2.0**-20)
    leaf = weight.detach().requires_grad_()
    (linear_cross_entropy(hidden.detach(), leaf, bias, targets, tiny) * 2.0**20).backward()
    wide = weight.detach().float().requires_grad_()
    plain_cross_entropy(hidden.detach().float(), wide, bias.float(), targets, tiny * 2**20).backward()
    assert relative_error(leaf.grad, wide.grad) < 5e-3


def test_autocast_gives_fp32_gradients_to_fp32_weights():
    arguments = problem(rows=64, width=32, vocab=300, bias=False)
    expected, expected_grads = gradients(plain_cross_entropy, arguments)

    def autocast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(*args)

    loss, grads = gradients(autocast, arguments)
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 1e-2 * expected
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    assert all(relative_error(a, b) < 2e-2 for a, b in zip(grads, expected_grads, strict=True))


def test_many_chunks_keep_bf16_gradients_accurate():
    layout = loss_module._layout(1_000_000, 50257, torch.bfloat16, "cpu", None)
    assert -(-1_000_000 // layout.chunk) <= 16
    assert -(-2048 // loss_module._layout(2048, 50257, torch.bfloat16, "cpu", None).chunk) == 4


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_needed_gradients_are_computed(wanted):
    arguments = problem()
    leaves = [a.detach().requires_grad_(want) for a, want in zip(arguments[:3], wanted, strict=True)]
    linear_cross_entropy(*leaves, *arguments[3:]).backward()
    _, expected = gradients(plain_cross_entropy, arguments)
    for leaf, want, grad in zip(leaves, wanted, expected, strict=True):
        if want:
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-5, atol=1e-7)
        else:
            assert leaf.grad is None


def test_gradients_on_a_gpu_are_scaled_in_pieces_without_a_wide_copy(monkeypatch):
    """On a GPU the gradient of a vocabulary is scaled in fp32, as its kernels would round the scalar."""
    monkeypatch.setattr(loss_module, "_SCALED_ELEMENTS", 64)
    gradient, scale = torch.randn(30, 10).bfloat16(), torch.tensor(1.7)
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest.append(out.numel())
            return out

    with fake_cuda(), Sizes():
        scaled = loss_module._scaled(OnFakeCuda(gradient), scale)
    assert torch.equal(scaled.cpu(), (gradient.float() * scale).bfloat16())
    assert max(largest) <= 64


def test_blocks_on_a_gpu_are_bounded():
    layout = loss_module._layout(16_384, 128_256, torch.bfloat16, "cuda", None)
    assert 4 * layout.block * layout.row_stride <= loss_module._DEVICE_BLOCK_BYTES


def test_second_backward_computes_the_same_gradients():
    arguments = problem()
    loss = linear_cross_entropy(*arguments) * 3
    first = torch.autograd.grad(loss, arguments[:3], retain_graph=True)
    second = torch.autograd.grad(loss, arguments[:3])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad", [True, False])
def test_logits_of_all_rows_are_never_in_memory(grad):
    rows, vocab = 512, 640
    loss_module.WORKSPACES.clear()
    arguments = problem(rows=rows, width=8, vocab=vocab)
    with torch.set_grad_enabled(grad), LargestTensor() as largest:
        loss = linear_cross_entropy(*arguments, chunk_rows=64)
        if grad:
            loss.backward()
    assert 64 * vocab <= largest.numel < rows * vocab // 4


def test_saves_gradients_but_not_the_weight():
    saved = []
    arguments = problem()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(*arguments)
    pointers = {t.data_ptr() for t in saved}
    assert len(saved) == 3
    assert not pointers & {a.data_ptr() for a in arguments}


def test_runs_on_fake_tensors_and_leaves_none_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    loss_module.WORKSPACES.clear()
    with FakeTensorMode():
        hidden, weight = torch.empty(64, 16, requires_grad=True), torch.empty(101, 16, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, None, torch.zeros(64, dtype=torch.int64), torch.ones(64))
        loss.backward()
        assert weight.grad.shape == weight.shape
    assert loss_module.WORKSPACES.idle_bytes == 0


def test_torch_compiles_what_is_around_the_loss_alone():
    arguments = problem()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda hidden, *rest: linear_cross_entropy(2 * hidden, *rest), backend="eager")
    found = gradients(compiled, arguments)
    assert counters["frames"]["total"] == 1
    expected = gradients(lambda hidden, *rest: linear_cross_entropy(2 * hidden, *rest), arguments)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))


def test_threads_do_not_share_a_workspace():
    arguments = problem(rows=256, width=16, vocab=500)
    expected = gradients(linear_cross_entropy, arguments)
    results = [None] * 4

    def work(index):
        results[index] = [gradients(linear_cross_entropy, arguments) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for actual in result:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
