"""Children of a test's process, for what must not stay in the process."""

import multiprocessing

import torch


def let_forks_compute_gradients():
    """Run a backward before any dry run of this process, if there is no GPU.

    The first backward of a process starts a thread for each GPU. A fork of a process with such threads cannot
    compute gradients. During a dry run, CUDA builds of torch count eight GPUs on a machine without GPUs.
    """
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


let_forks_compute_gradients()


def exit_code_of_child(target, *args):
    """Return the exit code of a child of this process. After a fork OpenMP can use one thread only."""

    def call():
        torch.set_num_threads(1)
        target(*args)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    return process.exitcode
