"""The kernels in C touch no memory beside their tensors, and have no undefined behaviour that gcc can find.

Each tensor lies between two pages that cannot be read or written. The sources are compiled so that undefined
behaviour ends the process, which is therefore a child of the test.
"""

import ctypes
import faulthandler
import mmap

import pytest
import torch

from children import exit_code_of_child
from headwater.core import attention, few_rows, native
from headwater.core.attention import attention_kernel_available
from headwater.core.few_rows import few_row_linear
from headwater.core.native import load
from headwater.sparsity import products
from headwater.sparsity.masks import PackedMask
from headwater.sparsity.products import MaskedProducts
from headwater.store.layout import tie_bytes
from headwater.store.native_adam import AdamKernel, AdamPiece, AdamSettings

FLAGS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
SHAPES = [  # sequences, heads, heads of keys, queries, keys, size
    (1, 1, 1, 1, 1, 16),
    (1, 2, 2, 1, 77, 64),
    (2, 6, 2, 65, 65, 32),
    (1, 2, 1, 37, 91, 80),
    (1, 2, 2, 91, 37, 96),
    (1, 1, 1, 33, 1100, 112),
    (1, 1, 1, 130, 130, 256),
    (1, 4, 1, 129, 257, 48),
]


class Fences:
    """Memory between pages without access.

    Args:
        side: the end of the memory, `low` or `high`, that touches such a page. The other end is up to a page
            away.
    """

    def __init__(self, side):
        self.side = side
        self.maps = []

    def empty(self, shape, dtype):
        count = torch.Size(shape if isinstance(shape, tuple) else (shape,)).numel()
        num_bytes = count * dtype.itemsize
        pages = -(-num_bytes // mmap.PAGESIZE)
        memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        self.maps.append(memory)  # they live as long as their tensors
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for page in (start, start + (pages + 1) * mmap.PAGESIZE):
            assert protect(page, mmap.PAGESIZE, 0) == 0
        gap = pages * mmap.PAGESIZE - num_bytes if self.side == "high" else 0
        found = torch.frombuffer(memory, dtype=dtype, count=count, offset=mmap.PAGESIZE + gap)
        return found.view(shape)

    def copy(self, tensor):
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def attend(shape, causal, padded, fences):
    """Compute one attention, and its gradients, between fences. Compare it with the usual one."""
    *_, heads, key_heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(shape[0], count, length, size, generator=generator).bfloat16()
        for count, length in ((heads, queries), (key_heads, keys), (key_heads, keys), (heads, queries))
    )
    counts = torch.randint(1, keys + 1, (shape[0],), generator=generator) if padded else None
    usual = attention._forward(query, key, value, counts, causal, 0.2)
    usual += attention._backward(gradient, query, key, value, *usual, counts, causal, 0.2)
    library = load(native._SOURCES / "attention.c", FLAGS)
    attention._library = lambda: library
    attention._heads_side_by_side = lambda like: fences.empty(like.shape, like.dtype)
    query, key, value, gradient = map(fences.copy, (query, key, value, gradient))
    if padded:
        counts = fences.copy(counts)
        # The kernel must not read what is behind the last key that a sequence sees.
        for each, count in enumerate(counts.tolist()):
            key[each, :, count:] = value[each, :, count:] = torch.nan
    fenced = attention._forward(query, key, value, counts, causal, 0.2)
    fenced += attention._backward(gradient, query, key, value, *fenced, counts, causal, 0.2)
    assert all(map(torch.equal, fenced, usual))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_attention_stays_inside_of_its_tensors(shape, causal, padded, side):
    if attention_kernel_available():
        assert exit_code_of_child(attend, shape, causal, padded, Fences(side)) == 0


def update(numel, encoding, narrow, fences):
    """Update one piece by Adam between fences, twice."""
    kernel = AdamKernel(load(native._SOURCES / "adam.c", ("-fno-math-errno", *FLAGS)), 8)
    state = torch.bfloat16 if narrow else torch.float32
    wire = fences.copy(torch.ones(numel, dtype=torch.bfloat16 if encoding else torch.float32))
    # All masters are ties, and all bits are set: the update reads and writes every byte.
    master = fences.copy(torch.full((numel,), -0x8000, dtype=torch.int16)) if encoding else None
    ties = fences.copy(torch.full((tie_bytes(numel),), 255, dtype=torch.uint8)) if encoding == 2 else None
    gradient = fences.copy(torch.ones(numel, dtype=state))
    moments = [fences.empty((numel,), state) for _ in range(2)]
    for step in (1, 2):
        piece = AdamPiece(
            *(None if each is None else each.data_ptr() for each in (wire, master, ties, gradient, *moments)),
            *(numel, 0, 0, 0, encoding, narrow, narrow, step == 1, 0.5, 1.0),
        )
        kernel.run([piece], [AdamSettings(0.1, 0.9, 0.99, 1e-8, 0.1, step, True, False)])
    assert wire.float().lt(0.9).all()


def multiply(rows, inner, columns, dtype, fences):
    """Compute a product of few rows between fences. Compare it with the usual one."""
    shapes = (rows, inner), (columns, inner), (columns,)
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in shapes]
    with torch.no_grad():
        usual = few_row_linear(*given)
        library = load(native._SOURCES / "few_rows.c", FLAGS)
        few_rows._library = lambda: library
        assert torch.equal(few_row_linear(*map(fences.copy, given)), usual)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (4, 129, 33), (2, 64, 10)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["low", "high"])
def test_a_product_of_few_rows_stays_inside_of_its_tensors(shape, dtype, side):
    assert exit_code_of_child(multiply, *shape, dtype, Fences(side)) == 0


def multiply_masked(rows, inputs, outputs, share, dtype, fences):
    """Compute the products of a masked layer between fences. Compare them with the usual ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    x, weight, bias, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = PackedMask(torch.rand(outputs, inputs, generator=generator) < share)
    products._is_faster = lambda *_: True

    def computed(mask, x, weight, bias, gradient):
        ours = MaskedProducts(lambda: mask, lambda: False)
        forward = ours.forward(x, weight, bias)
        return forward, ours.input_gradient(gradient, weight), ours.weight_gradient(gradient, x)

    usual = computed(mask, x, weight, bias, gradient)
    products._library.cache_clear()
    products.native_library = lambda name: load(native._SOURCES / f"{name}.c", FLAGS)
    mask = PackedMask.of_bits(fences.copy(mask.bits), mask.shape)
    arguments = list(map(fences.copy, (x, weight, bias, gradient)))
    torch.empty = lambda shape, dtype, device: fences.empty(shape, dtype)  # the kernel's own memory
    assert all(map(torch.equal, computed(mask, *arguments), usual))


@pytest.mark.parametrize("shape", [(1, 8, 8, 0.9), (65, 264, 24, 0.2), (130, 24, 264, 0.1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["low", "high"])
def test_products_of_a_masked_layer_stay_inside_of_their_tensors(shape, dtype, side):
    assert exit_code_of_child(multiply_masked, *shape, dtype, Fences(side)) == 0


def write_past_the_end(fences):
    faulthandler.disable()  # its report would be in the output of the test
    ctypes.memset(fences.empty((5,), torch.float32).data_ptr(), 0, 21)


def test_a_child_that_leaves_its_memory_is_noticed():
    assert exit_code_of_child(write_past_the_end, Fences("high")) < 0


@pytest.mark.parametrize("numel", [1, 7, 513, 20_003])
@pytest.mark.parametrize("encoding", [0, 1, 2])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("side", ["low", "high"])
def test_an_update_stays_inside_of_its_piece(numel, encoding, narrow, side):
    assert exit_code_of_child(update, numel, encoding, narrow, Fences(side)) == 0
