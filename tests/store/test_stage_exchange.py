"""The exchange of gradients between hosts: each host gets the sums that it updates, and all get the norms."""

import pytest
import torch
from thread_hosts import hosts

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.gradients.rank_sums import Beginning, RankSums
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.stage_exchange import StageExchange
from headwater.store.gradients.storage import MemoryStorage

STAGES = [
    StageSpec(stage, f"s{stage}", (ParamSpec(f"s{stage}.w", (4,), torch.float32, torch.float32),))
    for stage in range(2)
]
KEYS = [(0, 0), (1, 0)]
STEP = 1


def half(stage, param, host):
    """Each host updates one half of each parameter."""
    return range(2 * host, 2 * host + 2)


def gradient(host, key):
    return torch.arange(4.0) + 10 * host + 100 * key[0]


def exchanged(then, present=lambda host, key: True):
    """Add a gradient on each of two hosts, exchange them, and return the results of `then`."""

    def program(fabric):
        storage = MemoryStorage(SumSizes(STAGES, None), fabric)
        sums = RankSums(STAGES, fabric, storage, lambda _: Beginning(STEP), together=False)
        exchange = StageExchange(STAGES, fabric, sums, half)
        exchange.start(STEP, 0)
        for key in reversed(KEYS):
            if present(fabric.host, key):
                sums.add(key, gradient(fabric.host, key))
        sums.end_micro_batch()
        sums.finish()
        exchange.finish(STEP)
        found = then(fabric, sums, exchange)
        exchange.close()
        sums.close()
        return found

    return hosts(2, program)


def test_each_host_has_the_sums_of_all_for_the_elements_that_it_updates():
    found = exchanged(lambda fabric, sums, exchange: [sums.storage.read(key).clone() for key in KEYS])
    for host in range(2):
        own = slice(2 * host, 2 * host + 2)
        for key, values in zip(KEYS, found[host], strict=True):
            assert torch.equal(values[own], (gradient(0, key) + gradient(1, key))[own])


def test_all_hosts_have_the_norms_of_whole_sums():
    def norms(fabric, sums, exchange):
        exchange.gather_norms(STEP)
        return sums.norms.clone()

    wanted = torch.stack([(gradient(0, key) + gradient(1, key)).norm() for key in KEYS])
    for found in exchanged(norms):
        assert torch.allclose(found, wanted)


def test_a_gradient_of_one_host_is_the_sum_of_all():
    def program(fabric, sums, exchange):
        exchange.gather_norms(STEP)
        exchange.spread((0, 0))
        return sums.storage.read((0, 0)).clone(), [sums.has(key, STEP) for key in KEYS]

    for values, present in exchanged(program, lambda host, key: (host, key) == (1, (0, 0))):
        assert torch.equal(values, gradient(1, (0, 0)))
        assert present == [True, False]


def test_later_gradients_and_factors_change_the_elements_that_a_host_updates():
    def program(fabric, sums, exchange):
        exchange.add({(1, 0): torch.ones(4)}, STEP)
        exchange.multiply((0, 0), lambda: torch.full((4,), 2.0))
        exchange.measure(KEYS)
        exchange.gather_norms(STEP)
        for key in KEYS:
            exchange.spread(key)
        return [sums.storage.read(key).clone() for key in KEYS], sums.norms.clone()

    wanted = [2 * (gradient(0, (0, 0)) + gradient(1, (0, 0))), gradient(0, (1, 0)) + gradient(1, (1, 0)) + 1]
    for values, norms in exchanged(program):
        assert all(map(torch.equal, values, wanted))
        assert norms.tolist() == pytest.approx([each.norm().item() for each in wanted])
