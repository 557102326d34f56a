"""A dry run for a GPU casts as torch's autocast there: compared with torch's own kernels on fake tensors."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headwater.core.precision import Precision, autocast
from headwater.plan.gpu_casts import casts_of_gpu, policies
from headwater.plan.trace import trace_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def on_gpu():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    # Older versions of torch have overloads for named tensors, which the fake tensors of a dry run refuse.
    names = {name for name in names if "dimname" not in name.lower() and ".names_" not in name}
    # A build for GPUs has one more, which an LSTM of the CPU does not call.
    return {name for name in names if name.startswith("aten::")} - {"aten::_cudnn_rnn"}


def test_every_operator_that_torch_casts_on_a_gpu_is_in_one_list():
    assert on_gpu() <= policies().keys()
    # Versions of torch differ in this operator alone.
    assert policies().keys() - on_gpu() <= {"aten::rms_norm"}


CALLS = {
    # lower precision
    "linear": lambda t: functional.linear(t(4, 8), t(5, 8), t(5)),
    "matmul": lambda t: t(2, 4, 8) @ t(8, 3),
    "mm": lambda t: torch.mm(t(4, 8), t(8, 3)),
    "mv": lambda t: torch.mv(t(4, 8), t(8)),
    "bmm": lambda t: torch.bmm(t(2, 4, 8), t(2, 8, 3)),
    "addmm": lambda t: torch.addmm(t(3), t(4, 8), t(8, 3)),
    "addmv": lambda t: torch.addmv(t(4), t(4, 8), t(8)),
    "addr": lambda t: torch.addr(t(4, 8), t(4), t(8)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 4, 3), t(2, 4, 8), t(2, 8, 3)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(4, 8), t(8, 3)),
    "multi_dot": lambda t: torch.linalg.multi_dot([t(4, 8), t(8, 3), t(3, 2)]),
    "conv1d": lambda t: functional.conv1d(t(2, 3, 9), t(5, 3, 3)),
    "conv2d": lambda t: functional.conv2d(t(2, 3, 9, 9), t(5, 3, 3, 3)),
    "conv2d with named padding": lambda t: functional.conv2d(t(2, 3, 9, 9), t(5, 3, 3, 3), padding="same"),
    "conv_transpose2d": lambda t: functional.conv_transpose2d(t(2, 3, 9, 9), t(3, 5, 3, 3)),
    "prelu": lambda t: functional.prelu(t(4, 8), t(8)),
    "attention": lambda t: functional.scaled_dot_product_attention(*(t(2, 2, 4, 8) for _ in range(3))),
    # fp32
    "layer_norm": lambda t: functional.layer_norm(t(4, 8), (8,), t(8), t(8)),
    "group_norm": lambda t: functional.group_norm(t(4, 8, 3), 2, t(8), t(8)),
    "rms_norm": lambda t: functional.rms_norm(t(4, 8), (8,), t(8)),
    "exp": lambda t: t(4).exp(),
    "log": lambda t: t(4).log(),
    "pow of a number": lambda t: t(4) ** 2,
    "pow of tensors": lambda t: t(4) ** t(4),
    "number to a power": lambda t: 2 ** t(4),
    "reciprocal": lambda t: 1 / t(4),
    "rsqrt": lambda t: t(4).rsqrt(),
    "softplus": lambda t: functional.softplus(t(4)),
    "logsumexp": lambda t: t(4, 8).logsumexp(-1),
    "mse_loss": lambda t: functional.mse_loss(t(4), t(4)),
    "l1_loss": lambda t: functional.l1_loss(t(4), t(4)),
    "smooth_l1_loss": lambda t: functional.smooth_l1_loss(t(4), t(4)),
    "huber_loss": lambda t: functional.huber_loss(t(4), t(4)),
    "kl_div": lambda t: functional.kl_div(t(4, 8), t(4, 8), reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda t: functional.binary_cross_entropy_with_logits(t(4), t(4)),
    "nll_loss": lambda t: functional.nll_loss(t(4, 8), t.classes(4)),
    "cross_entropy": lambda t: functional.cross_entropy(t(4, 8), t.classes(4)),
    "cosine_similarity": lambda t: functional.cosine_similarity(t(4, 8), t(4, 8)),
    "cdist": lambda t: torch.cdist(t(4, 8), t(3, 8)),
    "interpolate": lambda t: functional.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "nearest": lambda t: functional.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="nearest"),
    # fp32 result
    "softmax": lambda t: t(4, 8).softmax(-1),
    "log_softmax": lambda t: functional.log_softmax(t(4, 8), -1),
    "softmax with a dtype": lambda t: t(4, 8).softmax(-1, dtype=FP16),
    "softmax of integers with a dtype": lambda t: t.classes(4).softmax(-1, dtype=FP16),
    "sum": lambda t: t(4, 8).sum(),
    "sum of rows": lambda t: t(4, 8).sum(1, keepdim=True),
    "sum with a dtype": lambda t: t(4, 8).sum(dtype=FP16),
    "sum of integers": lambda t: t.classes(4).sum(),
    "prod": lambda t: t(4).prod(),
    "prod of rows": lambda t: t(4, 8).prod(1),
    "cumsum": lambda t: t(4, 8).cumsum(1),
    "cumprod": lambda t: t(4, 8).cumprod(1),
    "vector_norm": lambda t: torch.linalg.vector_norm(t(4, 8)),
    "matrix_norm": lambda t: torch.linalg.matrix_norm(t(4, 8)),
    # fp32 overload
    "aten norm": lambda t: torch.ops.aten.norm.Scalar(t(4, 8)),
    "aten norm of rows": lambda t: torch.ops.aten.norm.ScalarOpt_dim(t(4, 8), 2, [1]),
    "norm": lambda t: t(4, 8).norm(),
    # widest
    "addcmul": lambda t: torch.addcmul(t(4), t(4, dtype=FP32), t(4)),
    "addcdiv": lambda t: torch.addcdiv(t(4), t(4), t(4)),
    "atan2": lambda t: torch.atan2(t(4), t(4, dtype=FP32)),
    "bilinear": lambda t: functional.bilinear(t(4, 3), t(4, 5), t(2, 3, 5)),
    "dot": lambda t: torch.dot(t(4), t(4, dtype=FP32)),
    "tensordot": lambda t: torch.tensordot(t(4, 8), t(8, 3), dims=1),
    "scatter_add": lambda t: t(4, 8).scatter_add(0, t.classes(1, 8), t(1, 8, dtype=FP32)),
    "cat": lambda t: torch.cat([t(4), t(4, dtype=FP32)]),
    "stack": lambda t: torch.stack([t(4), t(4)]),
    # not cast on a GPU; the last five are on a CPU
    "gelu": lambda t: functional.gelu(t(4)),
    "sum of two": lambda t: t(4) + t(4, dtype=FP32),
    "mean": lambda t: t(4, 8).mean(-1),
    "variance": lambda t: t(4, 8).var(-1),
    "dropout": lambda t: functional.dropout(t(4)),
    "embedding": lambda t: functional.embedding(t.classes(4), t(8, 3)),
    "batch_norm": lambda t: functional.batch_norm(t(4, 8), t(8, dtype=FP32), t(8, dtype=FP32)),
    "avg_pool3d": lambda t: functional.avg_pool3d(t(1, 2, 4, 4, 4), 2),
    "max_pool3d": lambda t: functional.max_pool3d(t(1, 2, 4, 4, 4), 2),
    "reflection_pad": lambda t: functional.pad(t(1, 2, 4), (1, 1), mode="reflect"),
    "replication_pad": lambda t: functional.pad(t(1, 2, 4), (1, 1), mode="replicate"),
    "trace": lambda t: t(4, 4).trace(),
}  # fmt: skip


class Made:
    """Makes fake tensors of one dtype on one device."""

    def __init__(self, device, dtype):
        self._device = device
        self._dtype = dtype

    def __call__(self, *shape, dtype=None):
        return torch.empty(*shape, dtype=dtype or self._dtype, device=self._device)

    def classes(self, *shape):
        return torch.empty(*shape, dtype=torch.long, device=self._device)


def of_torch(call, dtype, lower):
    """Return the dtype that torch's own autocast of a GPU leads to. Autograd cannot run without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", lower)
    torch.set_autocast_enabled("cuda", True)  # `torch.autocast` turns itself off without a GPU
    try:
        with FakeTensorMode(), torch.no_grad():
            result = call(Made("cuda", dtype))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert result.device.type == "cuda"
    return result.dtype


def of_dry_run(call, dtype, lower, *, grad):
    with FakeTensorMode(), torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=lower), casts_of_gpu():
        return call(Made("cpu", dtype)).dtype


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_dtypes_of_torchs_autocast_on_a_gpu(name):
    for lower in (BF16, FP16):
        for dtype in (lower, FP32, torch.float64):
            if dtype == torch.float64 and name in _ONE_DTYPE:
                continue  # torch refuses fp64 beside other dtypes in this operator
            wanted = of_torch(CALLS[name], dtype, lower)
            for grad in (False, True):
                assert of_dry_run(CALLS[name], dtype, lower, grad=grad) == wanted, (lower, dtype)


_ONE_DTYPE = {"addcmul", "dot", "scatter_add", "atan2", "batch_norm"}


def saved_bytes(compute, params):
    """Return the bytes that autograd saves in plain PyTorch, each memory once and without parameters."""
    saved, kept = {param.data_ptr(): 0 for param in params}, []

    def note(tensor):
        kept.append(tensor)
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        compute().backward()
    return sum(saved.values())


ROWS, WIDTH, CLASSES = 32, 16, 24


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).softmax(-1)


def on_wire():
    """Return a model with the dtypes in which weights are streamed, and its input."""
    model = Normed().to(BF16)
    model.norm.float()
    return model, torch.randn(ROWS, WIDTH, dtype=BF16)


def by_hand(model, x):
    """Compute as autocast of a GPU does, with its casts written out."""
    first, norm, last = model.first, model.norm, model.last
    hidden = functional.linear(x, first.weight)
    hidden = functional.layer_norm(hidden.float(), (WIDTH,), norm.weight, norm.bias)
    return functional.linear(hidden.to(BF16), last.weight).softmax(-1, dtype=FP32)


def total_saved(trace):
    return sum(cost.saved_bytes for cost in trace.costs)


def traced(model, device, x=None):
    x = torch.randn(ROWS, WIDTH, dtype=BF16) if x is None else x
    return trace_step(
        model, x, Precision("bf16"), loss_function=lambda m, x: m(x).square().sum(), device=device
    )


def test_the_saved_bytes_of_a_layer_norm_on_a_gpu_are_those_of_the_casts_by_hand():
    model, x = on_wire()
    wanted = saved_bytes(lambda: by_hand(model, x).square().sum(), [*model.parameters(), x])
    found = total_saved(traced(Normed(), "cuda", x))
    assert found == wanted
    # In fp32: the norm's input, mean and inverse deviation of each row, and the result of the softmax.
    assert found == 4 * (ROWS * WIDTH + 2 * ROWS + ROWS * CLASSES) + 2 * ROWS * WIDTH


def test_a_dry_run_for_a_cpu_counts_the_bytes_of_torch_there():
    model, x = on_wire()

    def compute():
        with torch.autocast("cpu"):
            return model(x).square().sum()

    # The inputs of the norm and of the last layer, which autograd saves, are counted as inputs of stages.
    wanted = saved_bytes(compute, [*model.parameters(), x]) - 2 * (2 * ROWS * WIDTH)
    found = total_saved(traced(Normed(), "cpu", x))
    # The CPU keeps mean and deviation of each row in fp32, and the fake operator in 16 bits.
    assert wanted - found in (0, 2 * 2 * ROWS)
    assert found < total_saved(traced(Normed(), "cuda", x)) / 3


def test_a_part_that_leaves_autocast_is_not_cast():
    class Left(Normed):
        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                assert self.norm(self.first(x)).dtype == BF16
            assert self.norm(self.first(x)).dtype == FP32
            return super().forward(x)

    traced(Left(), "cuda")


def test_in_fp32_both_devices_count_the_same():
    x = torch.randn(ROWS, WIDTH)
    traces = [
        trace_step(Normed(), x, loss_function=lambda m, x: m(x).square().sum(), device=device)
        for device in ("cpu", "cuda")
    ]
    assert traces[0] == traces[1]


def test_a_forward_that_is_recomputed_by_the_model_has_the_same_casts(tmp_path):
    seen = tmp_path / "seen"  # a file, because a dry run undoes changes of a list

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Normed()

        def forward(self, x):
            return checkpoint(self._body, x, use_reentrant=False)

        def _body(self, x):
            with seen.open("a") as file:
                print(self.body.norm(x).dtype, file=file)
            return self.body(x)

    traced(Recomputed(), "cuda", torch.randn(ROWS, WIDTH, dtype=BF16, requires_grad=True))
    assert seen.read_text().split() == [str(FP32)] * 2


def test_backward_runs_outside_of_autocast_as_in_a_run(tmp_path):
    seen = tmp_path / "seen"  # a file, because a dry run undoes changes of a list

    def write_down():
        with seen.open("a") as file:
            print(torch.is_autocast_enabled("cpu"), file=file)

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            write_down()
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            write_down()
            return gradient

    class Model(Normed):
        def forward(self, x):
            return Watched.apply(super().forward(x))

    for device in ("cpu", "cuda"):
        traced(Model(), device)
    assert seen.read_text().split() == ["True", "False"] * 2


def test_other_threads_and_later_code_cast_as_before():
    found = []

    def normed():
        with autocast(Precision("bf16"), "cpu"):
            found.append(functional.layer_norm(torch.ones(2, 4, dtype=BF16), (4,)).dtype)

    with casts_of_gpu():
        with casts_of_gpu():
            pass
        thread = threading.Thread(target=normed)
        thread.start()
        thread.join()
        normed()
    normed()
    assert found == [BF16, FP32, BF16]


def test_threads_that_plan_at_once_register_the_kernels_once():
    # A new process: here the kernels may be registered. The wait makes both threads begin before one is done.
    script = """
import threading, time
from headwater.plan import gpu_casts
begun, names = threading.Barrier(2), gpu_casts._cast_operators
def slow(key):
    time.sleep(0.2)
    return names(key)
gpu_casts._cast_operators = slow
def enter():
    begun.wait()
    with gpu_casts.casts_of_gpu():
        pass
threads = [threading.Thread(target=enter) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(len(gpu_casts._LIBRARIES))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("2", "")


def test_rms_norm_saves_its_input_and_numbers_of_rows_as_on_a_gpu():
    x, weight, saved = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True), []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with casts_of_gpu(), autocast(Precision("bf16"), "cpu"), saved_tensors_hooks(keep, lambda tensor: tensor):
        found = functional.rms_norm(x, (8,), weight, 1e-5)
    assert {tensor.data_ptr() for tensor in saved if tensor.numel() == x.numel()} == {x.data_ptr()}
    assert all(tensor.dtype == FP32 for tensor in saved)
    wanted = functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(found, wanted)
    ours, theirs = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (found, wanted))
    torch.testing.assert_close(ours, theirs)


def test_a_dry_run_leaves_the_rms_norm_of_the_cpu_as_it_is():
    norm = "torch.nn.functional.rms_norm(torch.ones(2, 8, requires_grad=True), (8,))"
    code = f"import torch; print({norm}.grad_fn)"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    with casts_of_gpu():
        pass
    here = functional.rms_norm(torch.ones(2, 8, requires_grad=True), (8,)).grad_fn
    assert str(here).split()[0] == alone.split()[0]


def test_rms_norm_has_derivatives_of_torch_func_in_a_dry_run():
    def loss(x):
        return functional.rms_norm(x, (8,)).square().sum()

    x = torch.randn(4, 8)
    with casts_of_gpu(), autocast(Precision("bf16"), "cpu"):
        found = torch.func.grad(loss)(x)
    torch.testing.assert_close(found, torch.func.grad(loss)(x))
