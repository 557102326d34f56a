"""Spins of waiting OpenMP threads: in most commands, in those that compute little, and as the user says."""

import os
import sys

import pytest

from headwater.cli.main import main
from headwater.core.spins import never_spin, spin_shortly

SPINS, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (SPINS, POLICY):
        monkeypatch.setenv(name, "")  # so that the value is restored after the test
        monkeypatch.delenv(name)


def run_as_process(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["headwater", *words])
    return main()


COMMANDS = {"serve": "0", "bigcode_eval": "0", "config": "10000"}


@pytest.mark.parametrize(("command", "expected"), COMMANDS.items())
def test_commands_that_compute_a_little_at_a_time_do_not_spin(command, expected, monkeypatch, capsys):
    spin_shortly()
    assert run_as_process(monkeypatch, command) != 0
    assert "expected a model to serve" in capsys.readouterr().err or command != "serve"
    assert os.environ[SPINS] == expected


def test_a_command_in_a_process_of_the_user_changes_nothing():
    assert main(["serve"]) != 0
    assert SPINS not in os.environ


@pytest.mark.parametrize(("name", "value"), [(SPINS, "77"), (SPINS, "infinity"), (POLICY, "ACTIVE")])
def test_values_of_the_user_are_kept(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    spin_shortly()
    never_spin()
    assert {key: os.environ[key] for key in (SPINS, POLICY) if key in os.environ} == {name: value}
