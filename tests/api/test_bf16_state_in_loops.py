"""`optimizer_state: bf16` in a loop of the user's: dtypes, checkpoints, and bits after a resume."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import headwater
from headwater.core.errors import ConfigError


def make(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    backend = headwater.backend("CSX", disk=folder, host_memory="64GiB", **options)
    compiled = headwater.compile(model, backend)
    return compiled, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def saved(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_same(some, others):
    for mine, theirs in zip(tree_leaves(some), tree_leaves(others), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_state_dict_has_fp32_tensors_and_a_resumed_loop_the_same_bits(tier, tmp_path):
    through = make(tmp_path, optimizer_state="bf16", tier=tier)
    train(*through, range(3))
    before = saved(*through)
    moments = [state[name] for state in before[1]["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert all(torch.equal(moment, moment.bfloat16().float()) for moment in moments)
    train(*through, range(3, 6))

    resumed = make(tmp_path, optimizer_state="bf16")
    resumed[0].load_state_dict(before[0])
    resumed[1].load_state_dict(before[1])
    train(*resumed, range(3, 6))
    assert_same(saved(*resumed), saved(*through))


def test_state_of_a_bf16_run_continues_exactly_in_plain_pytorch(tmp_path):
    model, optimizer = make(tmp_path, optimizer_state="bf16")
    train(model, optimizer, range(3))
    weights, state = saved(model, optimizer)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    other = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    plain.load_state_dict(weights)
    other.load_state_dict(copy.deepcopy(state))  # torch would train on the tensors of `state`
    exact = make(tmp_path)
    exact[0].load_state_dict(weights)
    exact[1].load_state_dict(state)
    train(plain, other, range(3, 5))
    train(*exact, range(3, 5))
    assert_same(exact[0].state_dict(), plain.state_dict())


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="one of exact, bf16, got 'fp8'") as error:
        headwater.backend("CSX", optimizer_state="fp8")
    assert "option optimizer_state" in str(error.value)
