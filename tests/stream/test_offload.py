"""Activations on disk: the number and order of writes and reads, and their memory."""

import gc
import threading

import pytest
import torch

from headwater.core.errors import StreamError
from headwater.core.units import MIB
from headwater.stream import offload as module
from headwater.stream.offload import DiskOffload
from headwater.stream.saved_tensors import without_weights

ELEMENTS = 64 << 10  # of fp32: a quarter of a MiB


class Disk(module.BlockFile):
    """A file that records the calls of all such files, and blocks while `gate` is closed."""

    log: list[tuple[str, str]]
    gate: threading.Event

    def read(self, offset, into):
        self.log.append(("read", self.path.stem))
        super().read(offset, into)

    def write(self, offset, data):
        self.log.append(("write", self.path.stem))
        self.gate.wait()
        super().write(offset, data)


@pytest.fixture
def disk(monkeypatch):
    Disk.log, Disk.gate = [], threading.Event()
    Disk.gate.set()
    monkeypatch.setattr(module, "BlockFile", Disk)
    return Disk


@pytest.fixture
def offload(disk, tmp_path):
    made = DiskOffload(tmp_path, window_bytes=MIB)
    yield made
    disk.gate.set()
    made.close()


def wait_until_written(*views):
    for view in views:
        view._moved.written.result()


def counted(disk, what):
    return [name for kind, name in disk.log if kind == what]


def test_views_of_one_storage_are_written_once_and_restored(disk, offload):
    packed = torch.randn(4, 3, ELEMENTS // 4)
    queries, keys, values = packed.unbind(1)
    views = [offload(tensor) for tensor in (queries, keys.t(), values[1:], packed.view(torch.int32))]
    wait_until_written(*views)
    assert len(counted(disk, "write")) == 1
    expected = [queries, keys.t(), values[1:], packed.view(torch.int32)]
    for view, tensor in zip(views, expected, strict=True):
        back = view()
        assert torch.equal(back, tensor)
        assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
    assert len(counted(disk, "read")) == 1


def test_a_tensor_that_has_changed_is_written_again(disk, offload):
    tensor = torch.zeros(ELEMENTS)
    before = offload(tensor)
    wait_until_written(before)
    tensor += 1
    after = offload(tensor)
    wait_until_written(after)
    assert before().sum() == 0
    assert after().sum() == ELEMENTS


def test_another_tensor_at_the_same_address_is_written(offload):
    held = []
    for number in range(20):
        tensor = torch.full((ELEMENTS,), float(number))
        held.append(offload(tensor))
        wait_until_written(held[-1])
        del tensor
    assert [view()[0].item() for view in held] == list(range(20))


def test_a_tensor_that_changes_before_it_is_written_raises(disk, offload):
    disk.gate.clear()
    tensor = torch.zeros(ELEMENTS)
    view = offload(tensor)
    tensor += 1
    disk.gate.set()
    with pytest.raises(StreamError, match="changed in place"):
        view()


def test_tensors_still_in_memory_are_not_read(disk, offload):
    disk.gate.clear()
    tensors = [torch.randn(ELEMENTS) for _ in range(3)]
    views = [offload(tensor) for tensor in tensors]  # two are being written, one waits
    assert torch.equal(views[2](), tensors[2])
    disk.gate.set()
    assert all(torch.equal(view(), tensor) for view, tensor in zip(views, tensors, strict=True))
    assert "activation_2" not in counted(disk, "read")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(16), torch.eye(512).to_sparse(), torch.randn(ELEMENTS).cfloat().conj()]
)
def test_small_and_unusual_tensors_are_not_offloaded(offload, tensor):
    assert offload(tensor) is None


def moved(offload, count):
    views = []
    for number in range(count):
        views.append(offload(torch.full((ELEMENTS,), float(number))))
    wait_until_written(*views)
    return views


def test_tensors_are_prefetched_in_reverse_order_within_the_window(disk, offload):
    views = moved(offload, 10)
    views.pop()()
    offload._reader.submit(lambda: None).result()
    assert counted(disk, "read") == [f"activation_{number}" for number in (9, 8, 7, 6)]  # 1 MiB
    while views:
        assert views.pop()()[0].item() == len(views)
    assert counted(disk, "read") == [f"activation_{number}" for number in range(9, -1, -1)]


def test_used_tensors_are_evicted_and_read_again(disk, offload):
    views = moved(offload, 10)
    for number in reversed(range(10)):
        assert views[number]()[0].item() == number
    assert views[9]()[0].item() == 9, "a graph that is kept may be gone through again"
    assert counted(disk, "read").count("activation_9") == 2


def test_at_most_one_window_waits_to_be_written(disk, offload):
    disk.gate.clear()
    done = []
    thread = threading.Thread(target=lambda: done.append(moved(offload, 5)))
    thread.start()
    while len(offload._stack) < 4:
        pass
    thread.join(0.05)
    assert len(offload._stack) == 4, "the fifth waits for room"
    disk.gate.set()
    thread.join()
    assert len(done[0]) == 5


def test_a_tensor_larger_than_the_window_is_offloaded(offload):
    large = torch.randn(8 * ELEMENTS)
    assert torch.equal(offload(large)(), large)


def test_a_graph_without_a_backward_leaves_no_tensors(disk, offload):
    views = moved(offload, 4)
    del views
    gc.collect()
    moved(offload, 1)
    assert len(offload._stack) == 1
    assert not offload._back


def test_a_failing_disk_raises_in_backward(disk, offload, monkeypatch):
    def fail(self, offset, into):
        raise OSError(5, "Input/output error")

    view = moved(offload, 1)[0]
    monkeypatch.setattr(Disk, "read", fail)
    with pytest.raises(OSError, match="Input/output"):
        view()


def test_a_failed_write_leaves_no_file_open(disk, offload, monkeypatch):
    closed = []

    def fail(self, offset, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "write", fail)
    monkeypatch.setattr(Disk, "close", lambda self: closed.append(self.path.stem))
    view = offload(torch.randn(ELEMENTS))
    with pytest.raises(OSError, match="No space"):
        wait_until_written(view)
    assert closed == ["activation_0"]


def test_backward_with_offloaded_activations_equals_plain(offload):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    batch = torch.randn(4, 64, 128)
    weights = {param.untyped_storage()._cdata for param in layer.parameters()}

    def gradients(*contexts):
        layer.zero_grad()
        with contexts[0]() if contexts else torch.enable_grad():
            loss = layer(layer(batch)).square().mean()
        loss.backward()
        return [param.grad for param in layer.parameters()]

    def saved():
        return without_weights(
            lambda tensor: None,
            lambda stage: torch.empty(0),
            lambda tensor: None if tensor.untyped_storage()._cdata in weights else offload(tensor),
        )

    for plain, streamed in zip(gradients(), gradients(saved), strict=True):
        assert torch.equal(plain, streamed)
