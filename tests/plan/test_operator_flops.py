"""FLOPs of fused attention on a CPU, which torch does not count."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from headwater.config.models.decoder import DecoderConfig
from headwater.models.registry import build_model
from headwater.plan.operator_flops import operator_flops
from headwater.plan.trace import trace_step

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def tensors(queries, keys):
    return torch.empty(2, 3, queries, 8), torch.empty(2, 3, keys, 8), torch.empty(2, 3, keys, 8)


def test_attention_without_a_mask_has_the_flops_of_its_products():
    query, key, value = tensors(7, 5)
    with FlopCounterMode(display=False) as counter:
        scores = query @ key.mT
        _ = scores @ value
    assert operator_flops(flash.default, (query, key, value), {}, None) == (
        *(counter.get_total_flops(),) * 2,
        0,
    )


def test_the_kernel_of_the_package_is_counted_like_that_of_torch_and_apart():
    query, key, value = tensors(7, 5)
    for causal in (False, True):
        theirs = operator_flops(flash.default, (query, key, value, 0.0, causal), {}, None).whole
        ours = operator_flops(
            torch.ops.headwater.attention.default, (query, key, value, None, causal, 1.0), {}, None
        )
        assert ours == (theirs, 0, theirs)
    arguments = (query, query, key, value, query, query, None, False, 1.0)
    ours = operator_flops(torch.ops.headwater.attention_backward.default, arguments, {}, None)
    assert ours == (5 * 2 * 2 * 3 * 35 * 8, 0, 5 * 2 * 2 * 3 * 35 * 8)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (7, 5), (5, 7), (1, 9)])
def test_causal_attention_counts_pairs_that_are_computed(queries, keys):
    pairs = sum(later >= earlier for later in range(queries) for earlier in range(keys))
    arguments = (*tensors(queries, keys), 0.0, True)
    assert operator_flops(flash.default, arguments, {}, None).attention == 2 * 2 * 3 * pairs * (8 + 8)


def test_a_backward_has_five_products():
    query, key, value = tensors(6, 6)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    found = operator_flops(backward, (query, query, key, value, query, query, 0.0, False), {}, None)
    assert found == (*(5 * 2 * 2 * 3 * 36 * 8,) * 2, 0)


def test_other_operators_have_no_attention():
    matrix = torch.empty(4, 4)
    found = operator_flops(torch.ops.aten.mm.default, (matrix, matrix), {}, matrix)
    assert found == (2 * 4**3, 0, 0)
    assert operator_flops(torch.ops.aten.add.Tensor, (matrix, matrix), {}, matrix) == (0, 0, 0)


def test_the_operators_of_torch_on_a_cpu_are_these():
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._overloadpacket)
            return func(*args, **(kwargs or {}))

    inputs = [torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
    with Names():
        scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()
    assert flash in names
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward in names


def test_blocks_of_a_decoder_count_their_attention():
    config = DecoderConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        vocab_size=64,
        max_position_embeddings=16,
        attention_dropout_rate=0.0,
    )
    tokens = torch.zeros(3, 17, dtype=torch.long)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": torch.ones(3, 16)}
    costs = trace_step(build_model(config, device="meta").train(), batch).costs
    product = 2 * 3 * 4 * (16 * 17 // 2) * 8
    blocks = [cost for cost in costs if cost.forward.attention_flops]
    assert [cost.forward.attention_flops for cost in blocks] == [2 * product] * 2
    assert [cost.backward.attention_flops for cost in blocks] == [5 * product] * 2
    products = 2 * 3 * 16 * 12 * 32**2
    assert [cost.forward.flops for cost in blocks] == [products + 2 * product] * 2
