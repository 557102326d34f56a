"""Scripts on several hosts for tests: network namespaces, one rank on each."""

import os

from benchmarks.namespaces import Hosts

PATIENCE_S = 500
"""Much more than a run takes: after a start of the machine torch alone is read for a minute."""


def run_on_hosts(script, arguments, folder, count=2):
    """Run a script with Python, as a rank on each of so many hosts; gives exit codes and what was printed."""
    with Hosts(count) as hosts:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        words = [str(each) for each in arguments]
        launchers = hosts.start_ranks(words, 1, folder, environment, program=[str(script)])
        return hosts.wait(launchers, folder, PATIENCE_S)
