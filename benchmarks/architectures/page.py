"""The table of architectures as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from benchmarks.architectures.compare import Row

_SIGNS = {"equal": "=", "refused": "refused", "differs": "**differs**", "failed": "**failed**"}

_HEAD = """\
# Architectures, compared with plain PyTorch

`python -m benchmarks.architectures --page docs/architectures.md` trains small models of many architectures
for three steps, in plain PyTorch and under plans of [`headwater conform`](compare_with_pytorch.md). It
compares losses, outputs, gradients, parameters, buffers and optimizer state bit for bit, and writes this
page. The results are from torch {version}.

The models are in `benchmarks/architectures`. They are small versions of the architectures that they are named
after, and not those of timm or diffusers. The optimizer is fused AdamW. Only the Fourier neural operator uses
AdamW without `fused`, because torch's fused AdamW does not support complex parameters.

Of {rows} architectures **{equal} are equal under every plan of the table**. `=` means equal. The classes of
the transformers library are on [another page](transformers.md).
"""


def page(rows: Sequence[Row], plans: Sequence[str]) -> str:
    """Return the Markdown page of these outcomes."""
    equal = sum(row.equal for row in rows)
    version = torch.__version__.partition("+")[0]
    lines = [
        _HEAD.format(version=version, rows=len(rows), equal=equal),
        f"| architecture | parameters | {' | '.join(plans)} |",
        f"|---|---:|{'---|' * len(plans)}",
    ]
    for family, members in groupby(rows, key=lambda row: row.family):
        lines.append(f"| *{family}* | |{' |' * len(plans)}")
        for row in members:
            signs = [_SIGNS.get(row.outcomes.get(plan, ""), "") for plan in plans]
            lines.append(f"| {row.name} | {row.parameters:,} | {' | '.join(signs)} |")
    reasons = [
        (row.name, plan, f"{row.outcomes[plan]}: {reason}")
        for row in rows
        for plan, reason in row.reasons.items()
    ]
    if reasons:
        lines += ["", "## Not equal", "", "| architecture | plan | what happened |", "|---|---|---|"]
        lines += [f"| {name} | {plan} | {reason} |" for name, plan, reason in reasons]
    return "\n".join([*lines, ""])
