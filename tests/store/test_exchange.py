"""The exchange of sums between hosts: runs are divided into parts and added in a fixed order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import ALONE
from headwater.store.gradients.exchange import Exchange, divide
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.storage import MemoryStorage

STAGES = [StageSpec(0, "s", (ParamSpec("w", (6,), torch.float32, torch.bfloat16),))]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5), st.integers(1, 6))
def test_parts_of_runs_are_equal_and_cover_every_element_once(spans, count):
    runs = [((0, i), min(span), max(span)) for i, span in enumerate(spans)]
    parts = [divide(runs, part, count) for part in range(count)]

    def elements(these):
        return [(key, element) for key, start, stop in these for element in range(start, stop)]

    assert [element for part in parts for element in elements(part)] == elements(runs)
    sizes = [len(elements(part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1


class TwoHosts:
    """A connection to another host that sends given bytes."""

    num_hosts = 2

    def __init__(self, host, theirs):
        self.host, self.theirs = host, theirs

    def start_exchange(self, out, into):
        into[1 - self.host].copy_(self.theirs)
        return lambda: None


def test_local_values_keep_their_precision_and_received_ones_have_the_wire_dtype():
    sizes = SumSizes(STAGES, torch.float32)
    storage = MemoryStorage(sizes, ALONE)
    own, theirs = torch.randn(6), torch.randn(6).to(torch.bfloat16)
    storage.write((0, 0), own)
    Exchange(TwoHosts(1, theirs.view(torch.uint8)), storage, STAGES).reduce(
        [[((0, 0), 0, 6)], [((0, 0), 0, 6)]]
    )
    assert torch.equal(storage.read((0, 0)), theirs.float() + own)
