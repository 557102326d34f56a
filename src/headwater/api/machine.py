"""The meaning of a backend's options for the engine."""

from __future__ import annotations

from headwater.config.sections import BackendConfig
from headwater.stream.options import EngineOptions


def engine_options(backend: BackendConfig, *, user_loop: bool = False) -> EngineOptions:
    """Return the options of a backend that concern the engine and not the planner."""
    return EngineOptions(
        user_loop=user_loop,
        fast_matmul=backend.matmul == "fast",
        compile_blocks=backend.compile,
        verify_disk=backend.verify_disk,
    )
