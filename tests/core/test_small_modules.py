"""Small modules of core: cleanup, copies, pickles, scores, signals, threads, uncompiled."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headwater.core.cleanup import on_failure
from headwater.core.copies import copied_arguments
from headwater.core.errors import CheckpointError, StreamError
from headwater.core.pickles import load_pickled
from headwater.core.scores import f_beta, intersection_over_union
from headwater.core.signals import handled
from headwater.core.threads import one_core
from headwater.core.uncompiled import uncompiled
from headwater.core.worker_pools import WorkerPool, single_core_pool, update_pool


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_clean_up_runs_only_after_a_failure(error):
    calls = []
    with on_failure(lambda: calls.append("cleaned")):
        pass
    assert calls == []
    with pytest.raises(error), on_failure(lambda: calls.append("cleaned")):
        raise error
    assert calls == ["cleaned"]


def test_copied_arguments_share_tensors_and_nothing_else():
    tensor, cache = torch.ones(2), {"keys": []}
    numbers = iter([1, 2])
    found_tensor, found_cache, found_numbers = copied_arguments((tensor, [cache, tensor], numbers))
    assert found_tensor is tensor and found_cache[1] is tensor
    assert (
        found_cache[0] == cache
        and found_cache[0] is not cache
        and found_cache[0]["keys"] is not cache["keys"]
    )
    assert list(found_numbers) == [1, 2]


def test_a_file_of_tensors_is_loaded_and_one_that_runs_code_is_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    assert load_pickled(tmp_path / "good.pt")["w"].tolist() == [1.0, 1.0]
    torch.save({"f": threading.Thread}, tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match="can run any code"):
        load_pickled(tmp_path / "code.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot be read|any code"):
        load_pickled(tmp_path / "cut.pt")


def test_scores_equal_their_definitions():
    hits, labelled, predicted = 3.0, 4.0, 6.0
    precision, recall = hits / predicted, hits / labelled
    for beta in (0.5, 1.0, 2.0):
        wanted = (1 + beta**2) * precision * recall / (beta**2 * precision + recall)
        assert f_beta(hits, labelled, predicted, beta) == pytest.approx(wanted)
    assert intersection_over_union(hits, labelled, predicted) == pytest.approx(3 / 7)


def test_handlers_of_signals_are_those_of_before_after_the_context():
    before, received = signal.getsignal(signal.SIGUSR1), []
    with handled({signal.SIGUSR1: lambda number, frame: received.append(number)}):
        signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is before


def test_a_thread_beside_the_main_one_installs_no_handlers():
    def run():
        with handled({signal.SIGUSR1: lambda number, frame: None}):
            found.append(signal.getsignal(signal.SIGUSR1))

    found, before = [], signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_threads_of_a_pool_use_one_core_and_the_main_thread_keeps_its_number():
    before = torch.get_num_threads()
    with single_core_pool(1, "test") as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        assert pool.submit(lambda: threading.current_thread().name).result().startswith("test")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("on_cpu", "cores", "used"), [(False, 1, 1), (False, 7, 7), (False, 8, 7), (False, 16, 14), (True, 16, 1)]
)
def test_updates_use_one_core_beside_the_cpu_and_seven_eighths_beside_a_gpu(on_cpu, cores, used):
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        with update_pool("test", on_cpu=on_cpu) as pool:
            assert pool.submit(torch.get_num_threads).result() == used
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)


def test_a_context_uses_one_core_in_its_thread_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_core(), one_core():
            assert torch.get_num_threads() == 1
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), one_core():
            _ = 1 / 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_pool_refuses_work_in_a_fork_of_the_process():
    pool = WorkerPool(1, "test")
    assert pool.submit(max, 1, 2).result() == 2
    child = os.fork()
    if child == 0:
        try:
            pool.submit(max, 1, 2)
        except StreamError as error:
            os._exit(0 if "in a fork of the process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.submit(max, 3, 2).result() == 3
    pool.shutdown()


def test_an_uncompiled_function_returns_and_raises_as_before():
    @uncompiled
    def divide(a, b=1):
        """Divide."""
        return a / b

    assert divide(6, b=3) == 2 and divide.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
