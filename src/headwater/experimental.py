"""An alias of the whole package, for scripts written as `import headwater.experimental as cstorch`."""

from __future__ import annotations

from typing import Any

import headwater


def __getattr__(name: str) -> Any:
    return getattr(headwater, name)


def __dir__() -> list[str]:
    return dir(headwater)
