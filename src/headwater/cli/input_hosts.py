"""Input workers of `headwater fit` on hosts that the params name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import yaml

from headwater.appliance.remote.address import Address, read_address
from headwater.appliance.remote.input_hosts import started_workers
from headwater.cli.appliance_option import say
from headwater.config.run import RunConfig
from headwater.fabric.cluster import is_watched
from headwater.fabric.secret import file_secret
from headwater.trainer.input_workers import SSH, STARTED
from headwater.trainer.run_dir import resolved_params


@contextmanager
def input_workers(config: RunConfig) -> Iterator[bool]:
    """Start the input workers that a run names as `ssh://host`, for the time of the context.

    Processes that are started meanwhile find the addresses in the environment.

    Args:
        config: the run.

    Yields:
        True if workers were started. A rank does not start workers, because its launcher has started them.

    Raises:
        HeadwaterError: if a worker does not start.
    """
    hosts = [] if is_watched() else _hosts(config)
    if not hosts:
        yield False
        return
    order = {
        "version": version("headwater"),
        "params": yaml.safe_dump(resolved_params(config), sort_keys=False, allow_unicode=True),
        "secret": file_secret(os.environ).decode(),
        "port": 0,
    }
    with started_workers(hosts, order, say) as places:
        os.environ[STARTED] = ",".join(places)
        try:
            yield True
        finally:
            del os.environ[STARTED]


def _hosts(config: RunConfig) -> list[Address]:
    """Return the host of each worker to start, in turn: `num_workers_per_csx` workers for each rank."""
    sections = [config.fit.train_dataloader, *config.fit.val_dataloader] if config.fit else []
    named = [text for section in sections for text in section.input_workers if text.startswith(SSH)]
    hosts = [read_address(text, where="input_workers") for text in dict.fromkeys(named)]
    cluster = config.init.backend.cluster_config
    per_csx = cluster.num_workers_per_csx
    count = len(hosts) if per_csx is None else per_csx * cluster.num_csx
    return list(itertools.islice(itertools.cycle(hosts), count)) if hosts else []
