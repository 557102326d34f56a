"""The part of the weight store that a plan counts against each host."""

import pytest

from headwater.core.placement import Placement
from headwater.plan.types import StoreShare
from headwater.trainer.planning import host_share


@pytest.mark.parametrize(
    ("placement", "hosts", "host", "share"),
    [
        (Placement(1), [0], 0, StoreShare()),
        (Placement(2), [0, 0], 0, StoreShare()),
        (Placement(4), [0, 0, 1, 1], 1, StoreShare(state=0.5, images=2, sums_stay=True)),
        (Placement(2, 1), [0, 0, 0], 0, StoreShare(disk_ranks=2, images=1, store_ranks=1)),
        (Placement(2, 2), [0, 0, 1, 1], 0, StoreShare(state=0.0, images=1, sums_stay=True)),
        (Placement(2, 2), [0, 0, 1, 1], 1, StoreShare(disk_ranks=2, images=3, store_ranks=2, sums_stay=True)),
        (Placement(3, 1), [0, 0, 1, 1], 1, StoreShare(disk_ranks=2, images=2, store_ranks=1, sums_stay=True)),
        (Placement(1, 3), [0, 0, 1, 1], 0, StoreShare(1.0, 1 / 3, 1.0, 2, 2, 1, True)),
    ],
)
def test_a_host_has_all_weights_and_the_state_that_its_owners_update(placement, hosts, host, share):
    assert host_share(placement, hosts, host) == share
