"""One thread: torch may divide sums differently for another number of threads."""

import pytest

pytest.register_assert_rewrite("harness")
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
