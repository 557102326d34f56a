"""Memory of CPU tensors in ranges: what they hold, and that tensors keep their values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.core.native import SWITCH, load
from headwater.core.tensor_memory import (
    flags_for_torch,
    range_bytes,
    tensor_ranges_available,
    tune_allocator,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")

START = """
import sys, torch
from headwater.core.tensor_memory import range_bytes, return_free_memory, tune_allocator
tune_allocator(keep=True)
MIB = 1 << 20
def megabytes(count):
    return torch.empty(int(count * MIB), dtype=torch.uint8)
"""


def run(script, **environment):
    """Run a script in a new process after `START`, and return what it prints."""
    return started(START + script, **environment)


def started(script, *arguments, **environment):
    """Run a script in a new process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_this_machine_has_the_ranges():
    assert tensor_ranges_available()


@pytest.mark.parametrize(("make", "value"), [("large_zeros", "0"), ("large_empty", "any")])
def test_large_tensors_are_in_the_ranges_too(make, value):
    script = f"""
from headwater.core.buffers import {make}
megabytes(80).fill_(1)  # freed memory, with values
before = range_bytes().used
tensor = {make}((80, MIB), torch.uint8)
print((range_bytes().used - before) // MIB, "any" if "{value}" == "any" else int(tensor.max()))
"""
    assert run(script) == f"80 {value}"


def test_an_aligned_temporary_tensor_reuses_freed_memory_of_the_ranges():
    script = """
from headwater.core.buffers import PAGE_BYTES, aligned_temporary
megabytes(80).fill_(1)
before = range_bytes()
tensor = aligned_temporary(79 * MIB + 1)
now = range_bytes()
is_new = now.mapped > before.mapped
print((now.used - before.used) // MIB, is_new, tensor.data_ptr() % PAGE_BYTES, tensor.numel() - 79 * MIB)
"""
    assert run(script) == "79 False 0 4096"


def test_an_aligned_temporary_tensor_has_whole_pages_without_ranges_too():
    script = """
import torch
from headwater.core.buffers import PAGE_BYTES, aligned_temporary
tensors = [aligned_temporary(size) for size in (0, 1)]
print([(tensor.numel() - PAGE_BYTES, tensor.data_ptr() % PAGE_BYTES) for tensor in tensors])
"""
    assert started(script) == "[(0, 0), (0, 0)]"


@pytest.mark.real_start
def test_a_repeated_step_needs_no_new_memory_and_holds_a_twentieth_more_than_its_tensors():
    script = """
def step():
    saved, highest, alive = [], 0, 0
    for block in range(12):
        for size in (3, 1.3, 12, 48.1, 7):
            temporary = megabytes(size * 2)
            saved.append(megabytes(size + block % 3))
            small = torch.empty(50_000)
            highest = max(highest, range_bytes().used)
            del temporary
    gradients = []
    while saved:
        work = megabytes(30)
        highest = max(highest, range_bytes().used)
        gradients.append(megabytes(1.1))
        saved.pop(), saved and saved.pop()
    return highest
highest = max(step(), step())
mapped = range_bytes().mapped
step()
now = range_bytes()
print(now.used + now.free <= 1.06 * highest, now.mapped == mapped, now.used)
"""
    assert run(script) == "True True 0"


@pytest.mark.real_start
def test_tensors_of_several_threads_keep_their_values():
    script = """
import random, threading
wrong = []
def work(seed):
    chance, held = random.Random(seed), []
    for turn in range(300):
        size = chance.choice((0, 1, 5_000, 262_144, 300_000, 1_000_000, 3_000_000))
        value = chance.randrange(100)
        held.append((torch.full((size,), value, dtype=torch.int32), value, size))
        if len(held) > 8 or chance.random() < 0.3:
            tensor, value, size = held.pop(chance.randrange(len(held)))
            if tensor.numel() != size or not bool((tensor == value).all()):
                wrong.append((seed, turn))
        if chance.random() < 0.02:
            return_free_memory()
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(wrong, range_bytes().used)
"""
    assert run(script) == "[] 0"


@pytest.mark.real_start
def test_a_fork_beside_threads_that_allocate_can_allocate():
    script = """
import os, threading
torch.set_num_threads(1)  # threads of OpenMP do not exist in a fork
over = threading.Event()
def work():
    while not over.is_set():
        megabytes(5), megabytes(2)
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
kept = torch.full((5 * MIB,), 3, dtype=torch.uint8)
codes = []
for _ in range(50):
    child = os.fork()
    if child == 0:
        kept.fill_(4)
        os._exit(int(megabytes(5).fill_(1)[7]) + int(kept[9]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
[thread.join() for thread in threads]
print(set(codes), int(kept.min()), int(kept.max()))
"""
    assert run(script) == "{5} 3 3"


@pytest.mark.real_start
def test_a_tensor_that_does_not_fit_raises_torchs_error_and_the_process_continues():
    script = """
import resource
kept = megabytes(600)
del kept
limit = 1200 * MIB + sum(map(int, [open("/proc/self/statm").read().split()[0]])) * 4096
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    megabytes(4000)
except RuntimeError as error:
    print("can't allocate memory" in str(error), end=" ")
again = megabytes(1500)  # with the addresses of the 600 MiB
kept = megabytes(50)
del again, kept
now = range_bytes()
print(now.free <= 1.06 * 1551 * MIB)  # the tensor that did not fit does not count
"""
    assert run(script) == "True True"


@pytest.mark.real_start
def test_a_negative_size_raises_torchs_error():
    script = """
megabytes(5)
storage = torch.empty(8).untyped_storage()
try:
    storage.resize_(-1)
except RuntimeError as error:
    print("negative number" in str(error), range_bytes().used)
"""
    assert run(script) == "True 0"


@pytest.mark.real_start
def test_free_ranges_whose_unmapping_the_system_refuses_lose_their_pages_and_are_used_again():
    # The system refuses to divide a mapping if the process has the most mappings that it may have.
    script = """
import ctypes
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, middle, after = (torch.ones(64 * MIB, dtype=torch.uint8) for _ in range(3))
address = middle.data_ptr()
assert abs(before.data_ptr() - after.data_ptr()) == 128 * MIB  # the middle one is between them
mmap = ctypes.CDLL(None).mmap
mmap.restype = ctypes.c_void_p
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
count = 0
while mmap(None, 4096, count % 2, 0x22, -1, 0) != ctypes.c_void_p(-1).value:
    count += 1
del middle
held = resident()
return_free_memory()
less = held - resident()
again = torch.ones(64 * MIB, dtype=torch.uint8)
print(less > 60 * MIB, again.data_ptr() == address, range_bytes().free)
"""
    # Python's own arenas are mappings, too, and malloc extends the heap instead. The heap of another thread
    # could leave a gap in which one of the ranges would be.
    assert run(script, PYTHONMALLOC="malloc", OMP_NUM_THREADS="1") == "True True 0"


def test_a_profiler_is_notified_of_a_freed_block_before_another_thread_can_take_it(tmp_path):
    tune_allocator(keep=True)
    library = load(Path(__file__).with_name("freed_block_report.cpp"), flags_for_torch(), tmp_path)
    assert library.reported_late() == 0


@pytest.mark.real_start
def test_a_process_that_does_not_use_the_ranges_does_not_compile_them(tmp_path):
    script = """
from pathlib import Path
from headwater.core.tensor_memory import range_bytes, return_free_memory
return_free_memory()
print(range_bytes(), list(Path(sys.argv[1]).rglob("*tensor_memory*")))
"""
    assert started("import sys" + script, str(tmp_path), XDG_CACHE_HOME=str(tmp_path)) == "None []"


@pytest.mark.real_start
def test_other_ways_to_change_a_storage_work():
    script = """
tensor = torch.arange(1_000_000)
tensor.resize_(3_000_000)
assert tensor[:1_000_000].equal(torch.arange(1_000_000))
storage = tensor.untyped_storage()
storage.resize_(8 * 100)
assert storage.nbytes() == 800 and tensor.untyped_storage().tolist()[:8] == [0] * 8
clone = torch.ones(1_000_000)._lazy_clone()
clone.add_(1)
assert clone.eq(2).all()
shared = torch.ones(1_000_000).share_memory_()
with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
    block = torch.empty(1 << 20)
assert profile.key_averages().self_cpu_time_total >= 0
events = [event for event in profile.events() if event.name == "aten::empty"]
assert events[0].cpu_memory_usage == 4 << 20, events
outlives = torch.ones(1 << 20)
print("whole")
"""
    assert run(script) == "whole"


@pytest.mark.real_start
def test_tensors_of_little_more_than_a_mebibyte_need_little_more_memory_than_their_bytes():
    script = """
held = [torch.empty(257, 1024) for _ in range(100)]
print(range_bytes().used <= 1.07 * sum(tensor.nbytes for tensor in held))
"""
    assert run(script) == "True"


@pytest.mark.real_start
def test_without_a_compiler_malloc_keeps_the_memory():
    assert run("print(range_bytes())", **{SWITCH: "0"}) == "None"


def test_a_second_call_returns_free_ranges_and_takes_what_exists_as_the_highest_sum():
    import torch

    tune_allocator(keep=True)
    held = torch.empty(64 << 20, dtype=torch.uint8)
    first = torch.empty(256 << 20, dtype=torch.uint8)
    del first
    tune_allocator(keep=True)
    assert range_bytes().free == 0
    last = torch.empty(300 << 20, dtype=torch.uint8)
    now = range_bytes()
    assert now.used + now.free <= 1.06 * now.used
    del held, last


def test_the_source_is_part_of_the_package():
    import headwater

    assert (Path(headwater.__file__).parent / "native" / "tensor_memory.cpp").exists()
