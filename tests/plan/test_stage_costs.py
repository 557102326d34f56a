"""Costs of stages, added up operator by operator."""

import torch

import headwater.core.attention  # noqa: F401 - registers the operator
from headwater.plan.stage_costs import StageCosts

ATTENTION_BACKWARD = torch.ops.headwater.attention_backward.default
MM, RELU, VIEW = torch.ops.aten.mm.default, torch.ops.aten.relu.default, torch.ops.aten.view.default


def cost_of(costs, stage=0):
    return costs.of(stage, recomputable=True)


def test_operators_count_for_the_current_stage():
    costs, left, right = StageCosts(2, inference=False), torch.zeros(3, 4), torch.zeros(4, 5)
    costs.enter(1, [left])
    assert costs.add(MM, (left, right), {}, left @ right) == 2 * 3 * 4 * 5
    costs.in_backward = True
    costs.add(MM, (left, right), {}, left @ right)
    assert (cost_of(costs, 1).forward.flops, cost_of(costs, 1).backward.flops) == (120, 120)
    assert cost_of(costs, 0).forward.flops == 0


def test_large_new_tensors_count_once_and_results_in_arguments_do_not():
    costs, large = StageCosts(1, inference=False), torch.zeros(1 << 20)
    add, add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    costs.add(add, (large, large), {}, large + large)
    costs.add(add_, (large, large), {}, large)
    costs.add(torch.ops.aten.add.out, (large, large), {"out": large}, large)
    costs.add(VIEW, (large, [-1]), {}, large.view(-1))
    costs.add(RELU, (large[:9],), {}, large[:9].relu())
    costs.in_backward = True
    costs.add(add, (large, large), {}, large + large)
    cost = cost_of(costs)
    assert (cost.forward.new_bytes, cost.backward.new_bytes) == (large.nbytes, large.nbytes)
    assert (cost.forward.operators, cost.backward.operators) == (5, 1)


def test_transient_bytes_are_those_of_the_largest_result_and_not_of_views():
    costs, tensor = StageCosts(1, inference=False), torch.zeros(6)
    costs.add(RELU, (tensor,), {}, tensor.relu())
    costs.add(VIEW, (tensor, [1, 6]), {}, torch.zeros(100))
    assert cost_of(costs).transient_bytes == 24


def test_gradients_of_shared_keys_are_summed_in_temporary_memory():
    query, key = torch.zeros(2, 6, 5, 16), torch.zeros(2, 3, 7, 16)
    for keys, sums in ((key, 2 * 2 * 6 * 7 * 16 * 4), (torch.zeros(2, 6, 7, 16), 0)):
        costs, given = (
            StageCosts(1, inference=False),
            (query, query, keys, keys, query, query[..., 0], True, 1.0),
        )
        costs.in_backward = True
        costs.add(ATTENTION_BACKWARD, given, {}, (query, keys, keys))
        assert cost_of(costs).transient_bytes == 4 * (query.numel() + 2 * keys.numel()) + sums


def test_saved_memory_counts_once_and_that_of_parameters_and_inputs_does_not():
    costs, param, given, made = StageCosts(1, inference=False), *(torch.zeros(4) for _ in range(3))
    costs.leave_out([param], [param])
    for tensor in (param, given, made, made[:2]):
        costs.save(tensor, {given.untyped_storage()._cdata})
    assert cost_of(costs).saved_bytes == 16


def test_a_forward_alone_counts_living_tensors():
    costs, param = StageCosts(1, inference=True), torch.zeros(100)
    costs.leave_out([param], [param])
    first = torch.zeros(4)
    costs.add(RELU, (first,), {}, first)
    second = torch.zeros(8)
    costs.add(RELU, (second,), {}, second)
    assert cost_of(costs).transient_bytes == 16 + 32


def test_backward_makes_the_stage_current_whose_output_it_reaches():
    costs, given = StageCosts(2, inference=False), torch.zeros(4, requires_grad=True)
    costs.enter(0, [given])
    output = given * 2
    costs.leave(0, [output])
    costs.enter(1, [output])
    output.sum().backward()
    assert costs.current == 0
    assert (cost_of(costs, 0).output_bytes, cost_of(costs, 1).input_bytes) == (16, 16)


def test_a_stage_takes_over_the_costs_of_another_one():
    costs = StageCosts(2, inference=False)
    costs.add(RELU, (), {}, torch.zeros(4))
    costs.take_over(1, 0)
    assert cost_of(costs, 1) == cost_of(costs, 0)


def test_a_saved_view_counts_as_its_whole_storage_and_a_view_of_a_buffer_does_not():
    costs = StageCosts(1, inference=False)
    table, projected = torch.zeros(1000), torch.zeros(8, 3 * 4)
    costs.leave_out([], [table])
    for part in projected.chunk(3, -1):  # query, key and value
        costs.save(part, set())
    costs.save(table[:10], set())
    assert cost_of(costs).saved_bytes == 4 * projected.numel()
