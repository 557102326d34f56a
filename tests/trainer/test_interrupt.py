"""Signals become requests to stop, and data workers do not receive Ctrl-C."""

import os
import signal
import threading

import pytest
from torch.utils.data import DataLoader, Dataset

from headwater.trainer.interrupt import interrupts, shielded


class BlockedSignals(Dataset):
    """A data set whose sample is True if the process that reads it has blocked SIGINT."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number, capfd):
    before = signal.getsignal(number)
    with interrupts() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
    assert signal.getsignal(number) == before
    assert "repeat the signal to stop at once" in capfd.readouterr().err


def test_another_thread_installs_no_signal_handlers():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with interrupts() as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.requested))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_shielded_blocks_the_signal_in_workers_but_not_in_this_process():
    loader = DataLoader(BlockedSignals(), num_workers=1, batch_size=None, multiprocessing_context="spawn")
    assert list(shielded(loader)) == [[index, True] for index in range(6)]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]])
def test_shielded_yields_every_item(items):
    assert list(shielded(items)) == items
