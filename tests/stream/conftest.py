"""Fixtures of the tests of the streaming engine."""

import pytest
import torch

pytest.register_assert_rewrite("harness")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: torch may split a sum differently for another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
