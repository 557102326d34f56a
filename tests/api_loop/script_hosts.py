"""Run scripts on several hosts, which are network namespaces with one rank each."""

import os

from benchmarks.namespaces import Hosts

PATIENCE_S = 240
"""Much more than a run takes; less than the limit of a test, so that a test that waits prints its threads."""


def run_on_hosts(script, arguments, folder, count=2):
    """Run a script as one rank on each of several hosts; return the exit codes and the printed text."""
    with Hosts(count) as hosts:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        words = [str(each) for each in arguments]
        launchers = hosts.start_ranks(words, 1, folder, environment, program=[str(script)])
        return hosts.wait(launchers, folder, PATIENCE_S)
