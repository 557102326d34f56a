"""Pictures of the documentation: `python docs/pictures/draw.py` writes them beside this file.

Each SVG has a light panel as its background, so that it is readable on a light and on a dark page. The
picture of the scaling law is the PNG that `headwater scaling fit` draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from headwater.scaling.picture import draw_report
from headwater.scaling.results import make_report

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"

INK, QUIET, PANEL, LINE = "#1f2933", "#52606d", "#f7f9fb", "#9aa5b1"
WATER, WARM, STONE = "#2b6cb0", "#b7541a", "#8a97a6"
TUNED = "“Tuned”: the C allocator keeps freed memory, as Headwater sets it."
FONT = "font-family='Helvetica, Arial, sans-serif'"


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return an SVG file with a panel behind its parts.

    Args:
        width: width in pixels.
        height: height in pixels.
        title: what the picture shows, for screen readers.
        parts: elements of SVG.
    """
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' role='img' {FONT}>\n<title>{escape(title)}</title>\n"
        f"<rect width='{width}' height='{height}' rx='12' fill='{PANEL}'/>\n{body}\n</svg>\n"
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 14,
    color: str = INK,
    anchor: str = "middle",
    bold: bool = False,
) -> str:
    """Return a line of text."""
    weight = " font-weight='bold'" if bold else ""
    style = f"font-size='{size}' fill='{color}' text-anchor='{anchor}'{weight}"
    return f"<text x='{x}' y='{y}' {style}>{escape(words)}</text>"


def box(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str = LINE, dash: bool = False
) -> str:
    """Return a rectangle with round corners."""
    dashes = " stroke-dasharray='5 4'" if dash else ""
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{stroke}' "
        f"stroke-width='1.5'{dashes}/>"
    )


def arrow(x1: float, x2: float, y: float, color: str) -> str:
    """Return a horizontal arrow from `x1` to `x2`."""
    tip = 12 if x2 > x1 else -12
    return (
        f"<line x1='{x1}' y1='{y}' x2='{x2 - tip}' y2='{y}' stroke='{color}' stroke-width='4'/>"
        f"<polygon points='{x2},{y} {x2 - tip},{y - 8} {x2 - tip},{y + 8}' fill='{color}'/>"
    )


def flow() -> str:
    """Return the picture of weights that flow to the device and of gradients that flow back."""
    parts = [
        text(165, 34, "Host memory or disk", size=17, bold=True),
        text(165, 54, "weight store", color=QUIET),
        box(30, 66, 270, 236, fill="#ffffff"),
        text(615, 34, "Device (GPU or CPU)", size=17, bold=True),
        text(615, 54, "room for the weights of a few stages", color=QUIET),
        box(480, 66, 270, 236, fill="#ffffff"),
    ]
    for row, name in enumerate(["stage 0", "stage 1", "stage 2", "stage 3", "…", "stage n"]):
        y = 78 + row * 36
        if name == "…":
            parts.append(text(165, y + 20, "⋮", size=18, color=QUIET))
            continue
        on_device = name in ("stage 1", "stage 2")
        parts += [
            box(44, y, 116, 28, fill="#d6e6f7" if on_device else "#eaf1f8", stroke=WATER),
            text(102, y + 19, f"{name}: weights", size=13),
            box(166, y, 122, 28, fill="#f3ece5", stroke=WARM),
            text(227, y + 19, "optimizer state", size=13),
        ]
    parts += [
        box(500, 84, 230, 44, fill="#d6e6f7", stroke=WATER),
        text(615, 111, "stage 1: computing"),
        box(500, 138, 230, 44, fill="#ffffff", stroke=WATER, dash=True),
        text(615, 165, "stage 2: arriving"),
        text(615, 214, "forward    0 → 1 → 2 → … → n", size=14),
        text(615, 240, "backward  n → … → 2 → 1 → 0", size=14),
        text(615, 278, "the Python code of your module", size=12, color=QUIET),
        arrow(308, 472, 140, WATER),
        text(390, 110, "weights of", size=13, color=WATER, bold=True),
        text(390, 127, "the next stage", size=13, color=WATER, bold=True),
        arrow(472, 308, 228, WARM),
        text(390, 214, "gradients", size=13, color=WARM, bold=True),
        text(390, 252, "as soon as complete", size=12, color=QUIET),
        text(165, 324, "the optimizer runs here", size=12, color=QUIET),
        text(615, 324, "activations: kept, recomputed or offloaded", size=12, color=QUIET),
    ]
    return svg(780, 342, "Weights flow from the store to the device; gradients flow back to the store", parts)


def peers() -> str:
    """Return the chart of speed and peak memory of the systems of `benchmarks.speed`."""
    measured = json.loads((RESULTS / "speed_bf16_zen5.json").read_text(encoding="utf-8"))
    rows = [row for row in measured["results"]["rows"] if row.get("tokens_per_s")]  # not those that failed
    fastest = max(row["tokens_per_s"] for row in rows)
    largest = max(row["peak_rss_gib"] for row in rows)
    height = 96 + 40 * len(rows) + 44
    parts = [
        text(24, 34, "GPT-2 124M, bf16, one step of 4 × 512 tokens", size=17, anchor="start", bold=True),
        text(258, 66, "tokens/s (more is better)", size=13, color=QUIET, anchor="start"),
        text(530, 66, "peak memory, GiB (less is better)", size=13, color=QUIET, anchor="start"),
    ]
    for number, row in enumerate(rows):
        y = 80 + number * 40
        own = row["system"].startswith("Headwater")
        color = WATER if own else STONE
        speed = 190 * row["tokens_per_s"] / fastest
        memory = 190 * row["peak_rss_gib"] / largest
        parts += [
            text(244, y + 20, _name(row["system"]), anchor="end", bold=own),
            f"<rect x='258' y='{y}' width='{speed:.1f}' height='28' rx='3' fill='{color}'/>",
            text(266 + speed, y + 19, f"{row['tokens_per_s']:.0f}", size=13, anchor="start"),
            f"<rect x='530' y='{y}' width='{memory:.1f}' height='28' rx='3' fill='{color}'/>",
            text(538 + memory, y + 19, f"{row['peak_rss_gib']:.2f}", size=13, anchor="start"),
        ]
    for y, words in ((height - 40, _conditions(measured["machine"])), (height - 20, TUNED)):
        parts.append(text(24, y, words, size=12, color=QUIET, anchor="start"))
    return svg(800, height, "Speed and peak memory of Headwater and four other systems", parts)


def _name(system: str) -> str:
    names = {
        "plain PyTorch, allocator tuned": "plain PyTorch, tuned",
        "Headwater, memory": "Headwater, memory tier",
        "Headwater, disk": "Headwater, disk tier",
    }
    return names.get(system, system)


def _conditions(machine: Mapping[str, Any]) -> str:
    processor = str(machine["processor"]).replace("(R)", "").replace(" Processor", "")
    torch_version = str(machine["torch"]).partition("+")[0]
    where = f"{machine['cores']} cores, {processor}, no GPU, torch {torch_version}"
    return f"Medians of interleaved rounds: {where}."


def scaling_law() -> None:
    """Draw the law of `benchmarks.scaling` as a PNG."""
    results = json.loads((RESULTS / "scaling_mup.json").read_text(encoding="utf-8"))["results"]
    rows = results["runs"] + results["predictions"]
    losses = [(row["name"], row["compute"], row["loss"]) for row in rows]
    draw_report(make_report(losses, len(results["predictions"])), HERE / "scaling_books.png")


def pictures() -> dict[str, str]:
    """Return the text of each SVG, by its file name."""
    return {"flow.svg": flow(), "peers.svg": peers()}


if __name__ == "__main__":
    for file, picture in pictures().items():
        (HERE / file).write_text(picture, encoding="utf-8")
    scaling_law()
