"""The report: one HTML file with the loss curves inside, readable without a network."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

TITLES = {"pretrain": "Pre-training", "instruct": "Instruction tuning", "prefer": "Preferences (DPO)"}
STYLE = """
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border: 1px solid #bbb; padding: .3rem .6rem; text-align: left }
img { max-width: 100% } .yes { background: #dff0d8 } .no { background: #f6dede }
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A trained stage: its length, the minutes of its steps, bits per byte of new text, and its folder."""

    name: str
    steps: int
    minutes: float
    bits_per_byte: float
    folder: Path


@dataclasses.dataclass(frozen=True)
class Answer:
    """A message, the word that it asks for (if it does), and answers with their success by stage."""

    message: str
    word: str | None
    texts: Mapping[str, str]
    kept: Mapping[str, bool]


def success(answers: Sequence[Answer], stage: str) -> tuple[int, int]:
    """Return how many answers of a stage have the word that was asked for, and how many were asked."""
    asked = [answer for answer in answers if answer.word is not None]
    return sum(answer.kept[stage] for answer in asked), len(asked)


def write_report(path: Path, stages: Sequence[Stage], answers: Sequence[Answer]) -> Path:
    """Write the report and return its path."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>A small chat model</title>",
        f"<style>{STYLE}</style></head><body><h1>A small chat model</h1>",
        "<p>A GPT that has learnt to chat from one text. Bits per byte are measured on the end of the text, "
        "which no stage has seen; lower is better. A question asks for a sentence with a word; no training "
        "data asked for these words.</p>",
        _numbers(stages, answers),
        *(_stage(stage) for stage in stages),
        "<h2>Answers</h2>",
        _answers(answers),
        "</body></html>\n",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _numbers(stages: Sequence[Stage], answers: Sequence[Answer]) -> str:
    rows = ["<tr><th>stage<th>steps<th>minutes<th>bits per byte<th>answers with the word</tr>"]
    for stage in stages:
        tuned = any(stage.name in answer.texts for answer in answers)
        kept = "{} of {}".format(*success(answers, stage.name)) if tuned else "–"
        rows.append(
            f"<tr><td>{TITLES[stage.name]}<td>{stage.steps}<td>{stage.minutes:.1f}"
            f"<td>{stage.bits_per_byte:.3f}<td>{kept}</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _stage(stage: Stage) -> str:
    title, curve = TITLES[stage.name], stage.folder / "loss_curve.png"
    if not curve.exists():
        return f"<h2>{title}</h2><p>no picture: run pip install 'headwater[plot]'</p>"
    picture = base64.b64encode(curve.read_bytes()).decode()
    return f"<h2>{title}</h2><img alt='loss over steps of {title}' src='data:image/png;base64,{picture}'>"


def _answers(answers: Sequence[Answer]) -> str:
    names = list(answers[0].texts) if answers else []
    rows = [f"<tr><th>message{''.join(f'<th>after: {TITLES[name]}' for name in names)}</tr>"]
    for answer in answers:
        cells = "".join(
            f"<td class='{'' if answer.word is None else 'yes' if answer.kept[name] else 'no'}'>"
            f"{html.escape(text)}"
            for name, text in answer.texts.items()
        )
        rows.append(f"<tr><td>{html.escape(answer.message)}{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"
