"""The owners of pieces, which update them: each piece has one owner, and owners have equal parts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.placement import Placement
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.layout import StageLayout
from headwater.store.ownership import Ownership


def layout_of(index, sizes):
    params = tuple(
        ParamSpec(f"{index}.{p}", (size,), torch.float32, torch.bfloat16) for p, size in enumerate(sizes)
    )
    return StageLayout(StageSpec(index, f"stage{index}", params), [{} for _ in params], elementwise=True)


def ownerships(layouts, placement, hosts, *, on_disk=False):
    stages = range(len(layouts)) if on_disk is True else on_disk or ()
    return [Ownership(layouts, rank, placement, hosts, on_disk=stages) for rank in range(placement.size)]


def pieces_of(layout):
    return [piece for group in layout.groups for piece in group.pieces]


stages = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4)
placements = st.builds(Placement, st.integers(1, 4), st.integers(0, 2))


@settings(deadline=None)
@given(stages, placements, st.integers(1, 4), st.booleans())
def test_each_piece_has_one_owner_and_all_hosts_together_have_every_element(sizes, placement, hosts, on_disk):
    layouts = [layout_of(index, each) for index, each in enumerate(sizes)]
    where = [rank * min(hosts, placement.size) // placement.size for rank in range(placement.size)]
    ranks = ownerships(layouts, placement, where, on_disk=on_disk)
    for stage, layout in enumerate(layouts):
        for piece in pieces_of(layout):
            owners = [own.rank for own in ranks if own.is_mine(stage, piece)]
            assert len(owners) == 1
            assert owners[0] in placement.owners
            assert ranks[owners[0]].updates(stage)
            assert {own.host for own in ranks if own.is_here(stage, piece)} == {where[owners[0]]}
        for param, spec in enumerate(layout.stage.params):
            runs = [ranks[0].host_run(stage, param, host) for host in range(where[-1] + 1)]
            assert [element for run in runs for element in run] == list(range(spec.numel))
            assert sum(own.is_first_of_mine(stage, param) for own in ranks) == 1
        for own in ranks:
            here = {id(piece) for piece in pieces_of(layout) if own.is_here(stage, piece)}
            assert here.isdisjoint(id(piece) for _, piece in own.elsewhere(stage))
            assert len(here) + len(own.elsewhere(stage)) == len(pieces_of(layout))
            assert own.own_bytes(stage) == own.wire_ranges(stage)[own.host]


def test_owners_update_equal_parts_and_one_rank_of_a_host_updates_a_stage_on_disk():
    layouts = [layout_of(0, [10] * 8), layout_of(1, [10] * 8)]
    in_memory = ownerships(layouts, Placement(4), [0, 0, 1, 1])
    assert [sum(own.is_mine(0, p) for p in pieces_of(layouts[0])) for own in in_memory] == [2, 2, 2, 2]
    on_disk = ownerships(layouts, Placement(4), [0, 0, 1, 1], on_disk=True)
    assert [own.updates(0) for own in on_disk] == [True, False, True, False]
    store_ranks = ownerships(layouts, Placement(2, 2), [0] * 4, on_disk=True)
    assert [own.owners(stage) for own in store_ranks[:1] for stage in range(2)] == [{2}, {3}]


def test_the_wire_bytes_of_hosts_follow_each_other():
    own = ownerships([layout_of(0, [32, 32])], Placement(2), [0, 1])[0]
    assert own.wire_ranges(0) == [slice(0, 64), slice(64, 128)]
