"""A device for tests whose copies are late: it fails where a read or write of its memory has no order.

Its memory is host memory, and the calling thread computes on it at once. Each stream copies on a thread,
after random delays, so that copies of different streams end in any order that events allow. Three checks
find work that an accelerator might do in the wrong order:

- *Clocks.* Each stream knows how far it has waited for the others (a vector clock), and so does the host. A
  copy or an operator that uses memory after another stream, with one of both writing, must have waited for
  that stream. This also finds work that happens to run in the right order here, such as a copy over a slab
  that is still read, or an update of weights that a copy still reads. Operators on page-locked memory run on
  the host, all others on the compute stream, as torch's operators do.
- *Poison.* The target of a copy is 0xFF, which is NaN in every float dtype, until the copy has run. So are
  new slabs, and page-locked memory that its borrower has dropped.
- *Snapshots.* An error if the source or target of a copy is freed, or its source changes, before it has run.

Use it as a context: inside, the operators of the calling thread are checked. `stand_in_for_cuda` gives it to
all engines of a test, and checks the operators of their worker threads too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.precision import autocast
from headwater.core.streams import Event, Stream
from headwater.stream.device import Device
from headwater.stream.devices import make_device
from headwater.stream.host_arena import HostArena

DELAYS_S = (0, 0, 0, 1e-4, 1e-3, 3e-3)
_POISON = 0xFF

Clock = dict[str, int]


class Race(AssertionError):
    """Two uses of the same memory have no order."""


class DoubleEvent(Event):
    def __init__(self, device: DeviceDouble, clock: Clock) -> None:
        self._device = device
        self.clock = clock
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(200), "a copy waits for ever"
        with self._device.lock:
            _join(self._device.host, self.clock)


class _DoubleStream(Stream):
    """The common part of the streams of copies and the stream of the computation."""

    def __init__(self, device: DeviceDouble, name: str) -> None:
        self.device, self.name = device, name
        self.clock: Clock = {}

    def tick(self) -> None:
        """Begin the next piece of work. It comes after all that a thread has waited for until now."""
        _join(self.clock, self.device.host)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def use(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype and target.shape == source.shape, "a copy converts nothing"
        assert target.stride() == source.stride(), "a copy keeps strides"
        assert source._is_view() or source.numel() == 0 or _is_dense(source), "a copy is of dense memory"
        with self.device.lock:
            self.tick()
            self.device.note(source, self, writes=False)
            self.device.note(target, self, writes=True)


class CopyStream(_DoubleStream):
    """A stream whose copies run late, on a thread."""

    def __init__(self, device: DeviceDouble, name: str) -> None:
        super().__init__(device, name)
        self._delays = random.Random(f"{device.seed} {name}")
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waited: list[DoubleEvent] = []
        self._thread = threading.Thread(target=self._run, name=f"double-{name}", daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.use(target, source)
        move = _Copy(target, source)
        if all(event.query() for event in self._waited) and self._work.empty():
            move.look()
        ctypes.memset(target.data_ptr(), _POISON, move.num_bytes)
        self._work.put(lambda: self._move(move))

    def _move(self, move: _Copy) -> None:
        try:
            move.look()
            time.sleep(self._delays.choice(DELAYS_S))
            move.run()
        except Race as race:
            self.device.races.append(str(race))

    def wait(self, event: Event) -> None:
        assert isinstance(event, DoubleEvent)
        with self.device.lock:
            _join(self.clock, event.clock)
        self._waited = [other for other in (*self._waited, event) if not other.query()]
        self._work.put(lambda: _wait(event))

    def record(self) -> Event:
        with self.device.lock:
            event = DoubleEvent(self.device, dict(self.clock))
        self._work.put(event.reached.set)
        return event

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(30)


class ComputeStream(_DoubleStream):
    """The stream of the computation. What it is told to do has been done when the call returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.use(target, source)
        _Copy(target, source).run()

    def wait(self, event: Event) -> None:
        assert isinstance(event, DoubleEvent)
        _wait(event)
        with self.device.lock:
            _join(self.clock, event.clock)

    def record(self) -> Event:
        with self.device.lock:
            self.tick()
            event = DoubleEvent(self.device, dict(self.clock))
        event.reached.set()
        return event


class _Host:
    """All threads of the host together. Python's locks order their work, so one clock is enough.

    Attributes:
        name: of the clock.
        clock: how far the host has waited for each stream.
    """

    name = "the host"

    def __init__(self) -> None:
        self.clock: Clock = {}

    def tick(self) -> None:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1


class _Checks(TorchDispatchMode):
    """A context in which a device double checks the operators of the calling thread."""

    def __init__(self, device: DeviceDouble) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._device.check(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():  # as where the operator was called
            return func(*args, **(kwargs or {}))


class DeviceDouble(Device):
    """See the module.

    Attributes:
        races: errors that threads of streams have found.
        locked: bytes of page-locked memory.
        num_locks: how often memory was locked.
        slabs: how many slabs were allocated.
        kept: bytes of slabs that existed when the allocator's cache was returned; `None` before.

    Args:
        seed: of the delays.
    """

    torch_device = torch.device("cpu")
    product = "double"
    reads_host = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.lock = threading.RLock()
        self._host = _Host()
        self.host = self._host.clock
        self.races: list[str] = []
        self.locked = self.num_locks = self.slabs = 0
        self.kept: int | None = None
        self._slabs: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._streams: list[CopyStream] = []
        self.compute = ComputeStream(self, "compute")
        self._writes: dict[int, tuple[str, int]] = {}  # by address of a storage: stream and its time
        self._reads: dict[int, Clock] = {}
        self._page_locked: set[int] = set()  # addresses
        self._checks = _Checks(self)

    def __enter__(self) -> DeviceDouble:
        self._checks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._checks.__exit__(*exception)

    # the interface of devices

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        self.slabs += 1
        slab = aligned_empty(num_bytes)
        ctypes.memset(slab.data_ptr(), _POISON, slab.nbytes)
        self._slabs.append((weakref.ref(slab.untyped_storage()), slab.nbytes))
        return slab

    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        assert all(each.data_ptr() % PAGE_BYTES == 0 for each in memory)
        locked = [(each.data_ptr(), each.nbytes) for each in memory]
        with self.lock:
            self.num_locks += len(locked)
            self.locked += sum(count for _, count in locked)
            self._page_locked.update(address for address, _ in locked)

        def unlock() -> None:
            while locked:
                address, count = locked.pop()
                with self.lock:
                    self.locked -= count
                    self._host.tick()
                    if address in self._reads:  # no copy may be under way
                        self._note(address, self._host, writes=True)
                    self._page_locked.discard(address)

        return unlock

    def new_stream(self) -> Stream:
        stream = CopyStream(self, f"copies {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def return_cached(self) -> None:
        self.kept = sum(count for storage, count in self._slabs if storage() is not None)

    def enter_thread(self) -> None:
        pass

    def watch_thread(self) -> None:
        """Check the operators of the calling thread until it ends."""
        _Checks(self).__enter__()

    # the order of uses

    def note(self, tensor: torch.Tensor, stream: _DoubleStream, *, writes: bool) -> None:
        """Check that a use of memory comes after all earlier uses that it must not overlap, and record it."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._reads:
            self._reads[address] = {}
            weakref.finalize(storage, self._forget, address).atexit = False
        self._note(address, stream, writes=writes)

    def _note(self, address: int, stream: _DoubleStream | _Host, *, writes: bool) -> None:
        before = [self._writes[address]] if address in self._writes else []
        if writes:
            before += self._reads[address].items()
        for name, number in before:
            if name != stream.name and stream.clock.get(name, 0) < number:
                race = f"{stream.name} {'writes' if writes else 'reads'} memory that {name} uses, unordered"
                self.races.append(race)
                raise Race(race)
        if writes:
            self._writes[address] = stream.name, stream.clock[stream.name]
            self._reads[address] = {}
        else:
            self._reads[address][stream.name] = stream.clock[stream.name]

    def _forget(self, address: int) -> None:
        self._reads.pop(address, None)
        self._writes.pop(address, None)

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check an operator that the calling thread is about to run."""
        uses = list(self._uses(func, args, kwargs))
        if uses:
            with self.lock:
                self._host.tick()
                self.compute.tick()
                for address, writes in uses:
                    if address in self._reads:  # its storage exists
                        on_host = address in self._page_locked
                        self._note(address, self._host if on_host else self.compute, writes=writes)

    def _uses(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[int, bool]]:
        """Yield the memory of copies that an operator uses: its address, and true if it is written."""
        schema = func._schema
        for position, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is not None and not alias.is_write and len(schema.returns) == 1:
                continue  # a view reads nothing
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in (value,) if isinstance(value, torch.Tensor) else _tensors_in(value):
                if self._is_known(leaf):
                    yield leaf.untyped_storage().data_ptr(), alias is not None and alias.is_write

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self._reads

    def drain(self) -> None:
        """Wait until all copies that are queued now have run."""
        for stream in self._streams:
            done = threading.Event()
            stream._work.put(done.set)
            done.wait(200)

    def end(self, *, unlocked: bool = True) -> None:
        """End the threads, and raise what they have found.

        Args:
            unlocked: also raise if page-locked memory is left, as while a test holds an exception.
        """
        for stream in self._streams:
            stream.end()
        assert self.races == [], self.races
        gc.collect()
        assert self.locked == 0 or not unlocked, "page-locked memory is left"


class _Copy:
    """A copy that does not keep its memory alive."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_bytes = source.numel() * source.element_size()
        self._ends = [(end.data_ptr(), weakref.ref(end.untyped_storage())) for end in (target, source)]
        self._seen: bytes | None = None

    def look(self) -> None:
        """Remember the source, if it was not remembered."""
        if self._seen is None:
            self._seen = self._read()

    def run(self) -> None:
        if self._seen is not None and self._seen != self._read():
            raise Race("the source of a copy was changed before it had run")
        (address, target), data = self._ends[0], self._read()
        with _held(target, "target"):
            ctypes.memmove(address, data, self.num_bytes)

    def _read(self) -> bytes:
        address, source = self._ends[1]
        with _held(source, "source"):
            return ctypes.string_at(address, self.num_bytes)


@contextlib.contextmanager
def _held(memory: weakref.ref[torch.UntypedStorage], end: str) -> Iterator[None]:
    """Keep the memory of a copy inside the context, where another thread could free it."""
    storage = memory()
    if storage is None:
        raise Race(f"the {end} of a copy was freed before it had run")
    yield
    del storage


def stand_in_for_cuda(device: DeviceDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA by a double in all engines, and check the operators of all threads that begin now."""
    monkeypatch.setattr(
        "headwater.stream.engine.make_device", lambda name: device if name == "cuda" else make_device(name)
    )
    monkeypatch.setattr(
        "headwater.stream.micro_batch.autocast", lambda precision, device: autocast(precision, "cpu")
    )
    make_pool, give_back = ThreadPoolExecutor.__init__, HostArena._return

    @functools.wraps(make_pool)
    def make(
        self: Any, max_workers: Any = None, thread_name_prefix: str = "", initializer: Any = None
    ) -> None:
        def enter() -> None:
            device.watch_thread()
            if initializer is not None:
                initializer()

        make_pool(self, max_workers, thread_name_prefix, enter)

    def give_back_poisoned(self: HostArena, block: Any) -> None:
        ctypes.memset(block.pages.data_ptr(), _POISON, block.pages.nbytes)
        give_back(self, block)

    monkeypatch.setattr(ThreadPoolExecutor, "__init__", make)
    monkeypatch.setattr(HostArena, "_return", give_back_poisoned)


def _tensors_in(value: object) -> list[torch.Tensor]:
    if not isinstance(value, list | tuple | dict):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _wait(event: DoubleEvent) -> None:
    assert event.reached.wait(200), "a stream waits for ever"


def _join(clock: Clock, other: Clock) -> None:
    for name, number in other.items():
        if number > clock.get(name, 0):
            clock[name] = number


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
