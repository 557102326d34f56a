"""The predicted time of the first forward on a GPU equals a timetable that was made by hand."""

import pytest

from headwater.plan.first_forward import Use, forward_s


@pytest.mark.parametrize(
    ("uses", "slabs", "seconds"),
    [
        ([Use(2), Use(3)], 1, 5),  # all stages are on the GPU
        ([Use(2, update_s=5, copy_s=1)], 1, 8),  # an update, a copy, and then the computation
        # The second update runs beside the first copy and computation.
        ([Use(2, update_s=5, copy_s=1), Use(2, update_s=5, copy_s=1)], 2, 13),
        # Updates run beside stages that are on the GPU.
        ([Use(4), Use(4), Use(2, update_s=5, copy_s=1), Use(2, update_s=2, copy_s=1)], 2, 12),
        # The second copy needs the slab of the first, so it begins when that computation ends.
        ([Use(6, copy_s=3), Use(6, copy_s=3)], 1, 18),
        ([Use(6, copy_s=3), Use(6, copy_s=3)], 2, 15),
        # Copies wait for each other.
        ([Use(1, copy_s=4), Use(1, copy_s=4), Use(1, copy_s=4)], 3, 13),
    ],
)
def test_the_timetable_by_hand(uses, slabs, seconds):
    assert forward_s(uses, slabs) == seconds
