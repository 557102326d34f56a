"""malloc returns large freed blocks to the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from headwater.core.buffers import tune_malloc
if sys.argv[1] != "system" and not tune_malloc(keep=sys.argv[1] == "keep"):
    sys.exit("this C library has no mallopt")
import psutil
def resident():
    return psutil.Process().memory_info().rss
torch.zeros(6 << 20)  # 24 MiB: without a setting, malloc begins to keep such blocks
before = resident()
blocks = [torch.ones(6 << 20) for _ in range(8)]
pin = torch.ones(100)  # at the top of the heap, so that malloc cannot shrink it
del blocks
print((resident() - before) >> 20)
"""


def kept_mib(setting):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting], capture_output=True, text=True, check=True, env=clean
    )
    return int(done.stdout)


@pytest.mark.real_start
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
def test_freed_blocks_are_kept_or_returned_as_asked():
    assert kept_mib("keep") > 150
    assert kept_mib("return") < 50
