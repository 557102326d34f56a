"""Children of a test's process, for what must not stay in the process."""

import multiprocessing

import torch


def exit_code_of_child(target, *args):
    """Return the exit code of a child of this process. After a fork OpenMP can use one thread only."""

    def call():
        torch.set_num_threads(1)
        target(*args)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    return process.exitcode
