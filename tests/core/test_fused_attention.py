"""Attention of the package in bf16, compared with attention in fp64 and with the kernel of torch.

On a machine without the kernel `fused_attention` is torch's, so the comparisons hold everywhere.
"""

import functools
import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headwater.core import attention
from headwater.core.attention import attention_kernel_available, fused_attention
from headwater.core.errors import RunError
from headwater.plan.operator_flops import temporary_bytes

OPERATOR = torch.ops.headwater.attention.default
BACKWARD = torch.ops.headwater.attention_backward.default
SHAPES = [  # sequences, heads, heads of keys, queries, keys, size, causal, factor on all inputs
    (1, 1, 1, 1, 1, 16, True, 1.0),
    (1, 2, 2, 1, 77, 64, False, 1.0),
    (2, 4, 4, 100, 100, 64, True, 1.0),
    (1, 2, 2, 128, 128, 64, False, 1.0),
    (2, 6, 2, 65, 65, 32, True, 1.0),
    (1, 8, 1, 130, 130, 64, True, 1.0),
    (1, 2, 1, 37, 91, 80, False, 1.0),
    (1, 2, 2, 91, 37, 48, True, 1.0),
    (1, 2, 2, 37, 91, 96, True, 1.0),
    (1, 1, 1, 33, 1100, 112, False, 1.0),
    (1, 1, 1, 700, 700, 128, True, 1.0),
    (1, 2, 2, 259, 259, 256, True, 1.0),
    (2, 2, 2, 200, 200, 64, True, 3.0),
    (1, 2, 2, 600, 600, 64, True, 10.0),
    (1, 2, 2, 150, 600, 64, False, 10.0),
]


def inputs(batches, heads, key_heads, queries, keys, size, factor=1.0):
    """Return queries, keys, values as views of products, as layers make them, and a gradient."""
    generator = torch.Generator().manual_seed(queries + keys)

    def draw(count, length):
        numbers = torch.randn(batches, length, count, size, generator=generator) * factor
        return numbers.bfloat16().transpose(1, 2)

    tensors = [draw(heads, queries), draw(key_heads, keys), draw(key_heads, keys)]
    return [each.requires_grad_() for each in tensors], draw(heads, queries) / factor


def exact(query, key, value, *, causal, mask=None, scale=None):
    """Attention in fp64 by plain operators of torch."""
    query, key, value = (each.double() for each in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value


def torchs(query, key, value, *, causal, mask=None):
    return fused_attention(query, key, value, causal=causal, mask=mask, kernel="torch")


def with_gradients(compute, tensors, gradient, **options):
    """Return the output and the gradients of queries, keys and values."""
    output = compute(*tensors, **options)
    return [output.detach(), *torch.autograd.grad(output, tensors, gradient.to(output.dtype))]


def error(found, right):
    return ((found.double() - right).norm() / right.norm().clamp_min(1e-30)).item()


def operators(call):
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    with Names():
        call()
    return names


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_torchs_kernel(shape):
    *sizes, causal, factor = shape
    tensors, gradient = inputs(*sizes, factor)
    right = with_gradients(exact, tensors, gradient, causal=causal)
    ours = with_gradients(fused_attention, tensors, gradient, causal=causal)
    theirs = with_gradients(torchs, tensors, gradient, causal=causal)
    for found, reference, expected in zip(ours, theirs, right, strict=True):
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        # A gradient that is zero in theory is rounding alone; 1e-3 is a quarter of a unit of bf16.
        assert error(found, expected) <= max(1.5 * error(reference, expected), 1e-3)


def padding(counts, queries, keys, causal):
    mask = (torch.arange(keys) < torch.tensor(counts)[:, None])[:, None, None].repeat(1, 1, queries, 1)
    return mask & torch.ones(queries, keys, dtype=torch.bool).tril() if causal else mask


@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "size", "counts"),
    [(2, 2, 100, 64, [100, 37]), (4, 1, 130, 32, [64, 130]), (6, 2, 700, 48, [1, 513])],
)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_after_the_text_is_not_seen(heads, key_heads, length, size, counts, causal):
    tensors, gradient = inputs(2, heads, key_heads, length, length, size)
    mask = padding(counts, length, length, causal)
    used = operators(lambda: fused_attention(*tensors, causal=False, mask=mask))
    assert (OPERATOR in used) == attention_kernel_available()
    with torch.no_grad():  # numbers there that would be seen
        for each in tensors[1:]:
            for sequence, count in zip(each, counts, strict=True):
                sequence[:, count:] = 1e4
    options = {"causal": False, "mask": mask}
    right = with_gradients(exact, tensors, gradient, **options)
    ours = with_gradients(fused_attention, tensors, gradient, **options)
    theirs = with_gradients(torchs, tensors, gradient, **options)
    for found, reference, expected in zip(ours, theirs, right, strict=True):
        assert error(found, expected) <= max(1.5 * error(reference, expected), 1e-3)
    for of_keys in ours[2:]:
        for sequence, count in zip(of_keys, counts, strict=True):
            assert sequence[:, count:].eq(0).all()


@pytest.mark.parametrize("mask", [padding([20, 9], 20, 20, True).flip(-1), torch.zeros(1, 1, 20, 20)])
def test_attention_with_other_masks_or_with_dropout_is_torchs(mask):
    tensors, _ = inputs(2, 2, 2, 20, 20, 32)
    for options in ({"mask": mask, "causal": False}, {"dropout": 0.1, "causal": True}):
        assert OPERATOR not in operators(lambda options=options: fused_attention(*tensors, **options))


def test_a_scale_multiplies_the_scores():
    tensors, gradient = inputs(1, 2, 1, 50, 50, 64)
    right = with_gradients(exact, tensors, gradient, causal=True, scale=0.3)
    for found, expected in zip(
        with_gradients(fused_attention, tensors, gradient, causal=True, scale=0.3), right, strict=True
    ):
        assert error(found, expected) < 5e-3


@pytest.mark.parametrize("sizes", [(1, 2, 2, 300, 300, 64), (1, 3, 1, 200, 200, 128), (3, 4, 2, 65, 130, 32)])
@pytest.mark.parametrize("causal", [True, False])
def test_bits_do_not_depend_on_the_number_of_threads(sizes, causal):
    tensors, gradient = inputs(*sizes)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(with_gradients(fused_attention, tensors, gradient, causal=causal))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize(
    ("change", "supported"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"size": 24}, False),
        ({"size": 272}, False),
        ({"scale": -1.0}, False),
        ({"kernel": "torch"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("gradients", [True, False])
def test_the_kernel_computes_what_it_supports(change, supported, gradients):
    dtype, size = change.get("dtype", torch.bfloat16), change.get("size", 32)
    tensors = [torch.randn(1, 2, 20, size, dtype=dtype, requires_grad=gradients) for _ in range(3)]
    options = {name: change[name] for name in ("scale", "kernel") if name in change}
    used = operators(lambda: fused_attention(*tensors, causal=True, **options))
    assert (OPERATOR in used) == (supported and attention_kernel_available())


def test_the_kernel_is_for_processors_with_avx512_and_without_amx(monkeypatch):
    cases = [
        (attention._NEEDED_FEATURES, True),
        (attention._NEEDED_FEATURES | {"amx_bf16", "amx_tile"}, False),
        (attention._NEEDED_FEATURES | {"avx512_bf16"}, True),
        (attention._NEEDED_FEATURES - {"avx512bw"}, False),
    ]
    for features, wanted in cases:
        built = []
        monkeypatch.setattr(attention, "processor_flags", lambda features=features: features)
        monkeypatch.setattr(attention, "native_library", built.append)
        assert attention._library.__wrapped__() is None
        assert built == (["attention"] if wanted else [])


def test_rows_that_are_not_contiguous_and_expanded_gradients():
    tensors, _ = inputs(1, 2, 2, 40, 40, 32)
    apart = [each.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for each in tensors]
    right = with_gradients(fused_attention, tensors, torch.ones(1, 2, 40, 32), causal=True)
    output = fused_attention(*apart, causal=True)
    output.sum().backward()
    for found, expected in zip((output, *(each.grad for each in apart)), right, strict=True):
        if attention_kernel_available():
            assert torch.equal(found, expected)
        # Torch may take another of its kernels for such rows.
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_an_input_that_is_not_a_number_stays_visible():
    tensors, _ = inputs(1, 1, 1, 30, 30, 32)
    with torch.no_grad():
        tensors[0][0, 0, 7, 3] = math.nan
        output = fused_attention(*tensors, causal=True)
        assert output.isnan().any(-1).flatten().nonzero().flatten().tolist() == [7]
        tensors[2][0, 0, 20, 5] = math.nan
        output = fused_attention(*tensors, causal=True)
    assert output[0, 0, 20:, 5].isnan().all()
    if attention_kernel_available():  # torch's kernel multiplies values that are not seen by zero
        assert not output[0, 0, 8:20].isnan().any()


@pytest.mark.parametrize("keys", [64, 1100])
def test_scores_of_minus_infinity_have_no_weight(keys):
    (query, key, value), gradient = inputs(1, 1, 1, 20, keys, 32)
    with torch.no_grad():
        query.abs_()
        key[:, :, :-20] = -3e38  # with 1,100 keys a whole block of scores is -inf
    right = F.scaled_dot_product_attention(query, key[:, :, -20:], value[:, :, -20:])
    found = fused_attention(query, key, value, causal=False)
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
    (of_values,) = torch.autograd.grad(found, [value], gradient)
    assert of_values[:, :, :-20].eq(0).all() and of_values[:, :, -20:].isfinite().all()


@pytest.mark.parametrize("factor", [3e3, 1e5, 1e8])
def test_huge_scores_choose_one_key(factor):
    """Products of such scores differ by more than the range of exponents, only because they are rounded."""
    tensors, gradient = inputs(1, 2, 1, 70, 70, 64, factor)
    right = with_gradients(exact, tensors, gradient, causal=True)
    found = with_gradients(fused_attention, tensors, gradient, causal=True)
    for ours, expected in ((found[0], right[0]), (found[3], right[3])):
        assert error(ours, expected) < 5e-3
    # In theory these are near 0. The rounding of two numbers that cancel each other remains.
    assert all(each.isfinite().all() for each in found)


def test_logarithms_of_sums_are_those_of_exact_scores():
    """The exponential has an error near one unit of fp32: the sums show it, because inputs are exact."""
    if not attention_kernel_available():
        return
    for factor in (1.0, 4.0):
        (query, key, value), _ = inputs(1, 2, 2, 90, 700, 64, factor)
        _, log2_sums = OPERATOR(query, key, value, None, False, 0.125)
        right = (query.double() @ key.double().mT * 0.125).logsumexp(-1) / math.log(2)
        torch.testing.assert_close(log2_sums.double(), right, rtol=3e-7, atol=3e-6)


def test_the_operator_passes_the_checks_of_torch():
    """The schema, shapes and strides without values, and derivatives under tracing."""
    if attention_kernel_available():
        (query, key, value), _ = inputs(2, 4, 2, 33, 33, 32)
        counts = torch.tensor([33, 5])
        torch.library.opcheck(OPERATOR, (query, key, value, None, True, 0.25))
        torch.library.opcheck(OPERATOR, (query, key, value, counts, False, 0.25))
        output, log2_sums = (each.detach() for each in OPERATOR(query, key, value, None, True, 0.25))
        arguments = [each.detach() for each in (output, query, key, value, output, log2_sums)]
        torch.library.opcheck(BACKWARD, (*arguments, None, True, 0.25))
        torch.library.opcheck(BACKWARD, (*arguments, counts, False, 0.25))


def test_memory_for_shared_keys_is_what_the_plan_counts():
    """The plan counts the sums that the backward allocates beside its results."""
    (query, key, value), gradient = inputs(1, 8, 2, 300, 300, 64)
    with torch.no_grad():
        output = fused_attention(query, key, value, causal=True)
        if attention_kernel_available():
            output, log2_sums = OPERATOR(query, key, value, None, True, 0.125)
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
                results = BACKWARD(gradient, query, key, value, output, log2_sums, None, True, 0.125)
            made = sum(event.cpu_memory_usage for event in profile.events() if event.name == "aten::empty")
            sums = temporary_bytes(BACKWARD, (gradient, query, key))
            assert sums > 0 and made == sums + sum(each.nbytes for each in results)


def test_a_recomputed_attention_has_the_same_bits():
    tensors, gradient = inputs(1, 2, 2, 70, 70, 64)
    kept = with_gradients(fused_attention, tensors, gradient, causal=True)

    def recomputed(*tensors, causal):
        return checkpoint(lambda *each: fused_attention(*each, causal=causal), *tensors, use_reentrant=False)

    assert all(map(torch.equal, with_gradients(recomputed, tensors, gradient, causal=True), kept))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_attention_has_the_same_bits():
    tensors, gradient = inputs(1, 2, 1, 70, 70, 64)
    kept = with_gradients(fused_attention, tensors, gradient, causal=True)
    compiled = torch.compile(fused_attention, fullgraph=True)
    assert all(map(torch.equal, with_gradients(compiled, tensors, gradient, causal=True), kept))


def test_a_second_derivative_is_torchs_usual_error():
    tensors, _ = inputs(1, 1, 1, 20, 20, 32)
    output = fused_attention(*tensors, causal=True)
    (first,) = torch.autograd.grad(output.float().square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|derivative"):
        first.sum().backward()


def loss(query, key, value, kernel="auto"):
    return fused_attention(query[None], key[None], value[None], causal=True, kernel=kernel).float().sum()


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # of torch itself
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "transform",
    [torch.func.vmap, lambda call: torch.func.vmap(torch.func.grad(call))],
    ids=["for each sample", "gradients for each sample"],
)
def test_transforms_of_functions_have_the_bits_of_torch(transform):
    tensors = [each.detach() for each in inputs(3, 2, 1, 20, 20, 32)[0]]
    expected = transform(functools.partial(loss, kernel="torch"))(*tensors)
    assert torch.equal(transform(loss)(*tensors), expected)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_a_forward_derivative_is_torchs_usual_error(kernel):
    """Not a derivative of zero."""
    tensors = [each.detach() for each in inputs(1, 2, 2, 20, 20, 32)[0]]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        fused_attention(
            forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:], causal=True, kernel=kernel
        )


def test_autocast_gives_the_kernel_its_dtype():
    layer = torch.nn.Linear(64, 3 * 64)
    with torch.autocast("cpu", torch.bfloat16):
        parts = layer(torch.randn(2, 20, 64)).view(2, 20, 3, 2, 32).permute(2, 0, 3, 1, 4).unbind()
        used = operators(lambda: fused_attention(*parts, causal=True))
    assert (OPERATOR in used) == attention_kernel_available()


def test_a_machine_without_memory(monkeypatch):
    class Library:
        def __getitem__(self, name):
            return lambda *_: 1

    monkeypatch.setattr(attention, "_library", Library)
    tensors, _ = inputs(1, 1, 1, 20, 20, 32)
    with pytest.raises(RunError, match="memory"), torch.no_grad():
        OPERATOR(*tensors, None, True, 1.0)
