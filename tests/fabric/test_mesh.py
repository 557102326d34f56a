"""Values sent over a mesh of ranks: gathered, exchanged and broadcast."""

import contextlib
import threading

import pytest
import torch

from headwater.fabric.mesh import Mesh
from headwater.fabric.switchboard import Switchboard, listen_on_host
from headwater.fabric.values import broadcast_value, exchange_values, gather_values

SIZE = 3


@pytest.fixture
def meshes():
    """Yield a mesh for each of three ranks, which are threads of this process."""
    with contextlib.ExitStack() as opened:
        boards = [Switchboard(rank, b"s" * 32, listen_on_host(8)) for rank in range(SIZE)]
        for board in boards:
            opened.callback(board.close)
            board.learn([each.address for each in boards])
        found = [Mesh(board, range(SIZE), 60, "test") for board in boards]
        for mesh in found:
            opened.callback(mesh.close)
        yield found


def on_each(meshes, work):
    """Return the result of `work(mesh)` on each rank."""
    results = {}
    threads = [
        threading.Thread(target=lambda mesh=mesh: results.update({mesh.own: work(mesh)})) for mesh in meshes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(SIZE)]


def test_each_rank_gathers_the_values_of_all_in_order(meshes):
    assert on_each(meshes, lambda mesh: gather_values(mesh, mesh.own, int)) == [[0, 1, 2]] * SIZE


def test_each_rank_receives_what_the_others_address_to_it(meshes):
    found = on_each(
        meshes, lambda mesh: exchange_values(mesh, [f"{mesh.own}→{to}" for to in range(SIZE)], str)
    )
    assert found == [[f"{source}→{rank}" for source in range(SIZE)] for rank in range(SIZE)]


def test_a_broadcast_returns_the_value_of_its_source(meshes):
    found = on_each(
        meshes, lambda mesh: broadcast_value(mesh, torch.full((2,), float(mesh.own)), torch.Tensor, 1)
    )
    assert [value.tolist() for value in found] == [[1.0, 1.0]] * SIZE


def test_tensors_of_known_size_are_sent_without_a_message(meshes):
    def swap(mesh):
        others = [rank for rank in range(SIZE) if rank != mesh.own]
        into = {rank: [torch.empty(4)] for rank in others}
        mesh.start({rank: [torch.full((4,), float(mesh.own))] for rank in others}, into)()
        return {rank: tensor[0].item() for rank, (tensor,) in into.items()}

    assert on_each(meshes, swap) == [{r: float(r) for r in range(SIZE) if r != rank} for rank in range(SIZE)]
