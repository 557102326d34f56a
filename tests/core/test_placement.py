"""Numbers of ranks, and the error for a number of CSXs that is not valid."""

import pytest

from headwater.core.errors import ConfigError
from headwater.core.placement import Placement, check_csx_limit


@pytest.mark.parametrize(
    ("placement", "owners"),
    [(Placement(2), range(2)), (Placement(2, 1), range(2, 3)), (Placement(), range(1))],
)
def test_store_ranks_own_masters_if_there_are_any(placement, owners):
    assert placement.owners == owners and placement.size == placement.num_csx + placement.num_memx


@pytest.mark.parametrize(("num_csx", "most", "valid"), [(5, 4, "1 to 4"), (0, 4, "1 to 4"), (2, 1, "1")])
def test_an_error_names_the_valid_numbers_of_csxs(num_csx, most, valid):
    with pytest.raises(ConfigError) as refused:
        check_csx_limit(num_csx, most, "GPUs", where="--num_csx", remedy="add GPUs")
    assert refused.value.what == f"expected num_csx to be {valid} (GPUs), got {num_csx}"
    assert (refused.value.where, refused.value.remedy) == ("--num_csx", f"write {valid}, or add GPUs")


def test_valid_numbers_of_csxs_are_accepted():
    for num_csx in (1, 4):
        check_csx_limit(num_csx, 4, "GPUs", where="--num_csx")
