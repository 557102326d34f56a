"""Ctrl-C while a command imports its modules ends the command quietly."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_start

INTERRUPTED = """
import os, signal, sys

interrupted, command, *words = sys.argv[1:]

class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == interrupted:  # the system sends the signal while this module is imported
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
from headwater.cli import start
sys.argv[1:] = words
sys.exit(getattr(start, command)())
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("headwater.cli.main", ["headwater", "demo"]),
        ("headwater.trainer.interrupt", ["headwater", "demo"]),
        ("headwater.cli.demo", ["headwater", "demo"]),
        ("headwater.appliance", ["csctl", "get", "jobs"]),
    ],
)
def test_ctrl_c_during_imports_ends_a_command_as_any_other_interruption(module, words):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_both_commands_begin_at_their_entry_points():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, place in project["scripts"].items():
        module, _, function = place.partition(":")
        assert (module, function) == ("headwater.cli.start", name)
        assert callable(getattr(importlib.import_module(module), function))
