"""Environment variables through which the launcher of one host passes facts to its ranks."""

from __future__ import annotations

PARENT = "HEADWATER_PARENT"
"""Environment variable: process number of the launcher that started this process as a rank."""

LISTENER = "HEADWATER_LISTENER"
"""Environment variable: descriptor of the socket at which rank 0 will listen; the launcher opens it."""

RENDEZVOUS = "HEADWATER_RENDEZVOUS"
"""Environment variable: address at which the other ranks reach rank 0 on this host."""
