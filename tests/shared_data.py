"""The folder of the public data sets that cannot be shipped."""

import os
from pathlib import Path

SHARED = Path(os.environ.get("HEADWATER_SHARED") or Path(__file__).resolve().parents[2] / "shared")
