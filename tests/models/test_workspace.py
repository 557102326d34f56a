"""The pool of scratch memory."""

import torch

from headwater.models.workspace import WorkspacePool

CPU = torch.empty(0)


def test_memory_is_reused():
    pool = WorkspacePool()
    with pool.borrow(CPU, torch.float32, 100) as first:
        address = first.data_ptr()
    assert pool.idle_bytes == 400
    with pool.borrow(CPU, torch.float32, 60) as second:
        assert (second.data_ptr(), second.shape) == (address, (60,))
    assert pool.idle_bytes == 400


def test_two_borrowers_get_different_memory_and_the_larger_is_kept():
    pool = WorkspacePool()
    with pool.borrow(CPU, torch.float32, 10) as first, pool.borrow(CPU, torch.float32, 20) as second:
        first.fill_(1)
        second.fill_(2)
        assert first.eq(1).all()
    assert pool.idle_bytes == 80


def test_a_larger_request_replaces_the_buffer():
    pool = WorkspacePool()
    for numel in (10, 1000):
        with pool.borrow(CPU, torch.bfloat16, numel) as buffer:
            assert buffer.numel() == numel
    assert pool.idle_bytes == 2000
    pool.clear()
    assert pool.idle_bytes == 0
