"""The table of architectures as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from benchmarks.architectures.compare import Row
from headwater.conform.plans import PLANS

_SIGNS = {"equal": "=", "refused": "refused", "differs": "**differs**", "failed": "**failed**"}


def page(rows: Sequence[Row]) -> str:
    """Return the page of these outcomes."""
    equal = sum(row.equal for row in rows)
    lines = [
        "# Architectures, compared with plain PyTorch",
        "",
        "`python -m benchmarks.architectures --page docs/architectures.md` trains small models of many kinds for "
        "three steps, plainly and under each plan of",
        "[`headwater conform`](conform.md), and compares losses, outputs, gradients, parameters, buffers and "
        "optimizer state bit for bit. The models are written in",
        "`benchmarks/architectures`, in the manner of the architectures that they are named after; they are not "
        f"those of timm or diffusers. This page is its output with torch {torch.__version__.partition('+')[0]}.",
        "",
        f"Of {len(rows)} architectures **{equal} are equal under every plan**. `=` means equal. The classes of the "
        "transformers library have [their own page](transformers.md).",
        "",
        f"| architecture | parameters | {' | '.join(PLANS)} |",
        f"|---|---:|{'---|' * len(PLANS)}",
    ]
    for family, members in groupby(rows, key=lambda row: row.family):
        lines.append(f"| *{family}* | |{' |' * len(PLANS)}")
        for row in members:
            signs = [_SIGNS.get(row.outcomes.get(plan, ""), "") for plan in PLANS]
            lines.append(f"| {row.name} | {row.parameters:,} | {' | '.join(signs)} |")
    reasons = [(row.name, plan, reason) for row in rows for plan, reason in row.reasons.items()]
    if reasons:
        lines += ["", "## Not equal", "", "| architecture | plan | what happened |", "|---|---|---|"]
        lines += [f"| {name} | {plan} | {reason} |" for name, plan, reason in reasons]
    return "\n".join([*lines, ""])
