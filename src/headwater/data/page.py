"""HTML page that shows prepared samples as a model reads them: tokens, labels in the loss, packed texts."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from headwater.core.errors import DataError
from headwater.data.checksums import CheckedSamples
from headwater.data.multimodal.layout import CHANNELS as IMAGE_CHANNELS
from headwater.data.records import CSVRecords
from headwater.data.sample_file import SPAN_CHANNELS
from headwater.data.statistics import Statistics, read_statistics
from headwater.data.tokenizer import load_tokenizer

_TEXT_COLOURS = 6
_SUFFIXES = (".h5", ".csv", ".txt")


@dataclasses.dataclass(frozen=True)
class Token:
    """A token on the page.

    Attributes:
        text: the decoded token.
        about: tooltip.
        counts: True if its label counts in the loss.
        padding: True for a padding token.
        group: index of the token's text in the sample.
    """

    text: str
    about: str
    counts: bool = False
    padding: bool = False
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Strip:
    """A row of tokens with a title."""

    title: str
    tokens: list[Token]


def write_page(folder: Path, out: Path, *, num_samples: int = 8) -> None:
    """Write the first samples of `train/` and `val/` as one self-contained HTML page.

    Args:
        folder: output folder of `headwater data`.
        out: file to write.
        num_samples: maximum samples of `train/`, and of `val/`.

    Raises:
        DataError: if the folder holds no prepared data, or the page cannot be written.
    """
    statistics = read_statistics(folder)
    tokenizer = load_tokenizer(folder / statistics.tokenizer_file)
    sections = []
    for split in ("train", "val"):
        cards = []
        for number, (where, strips) in enumerate(_samples(folder / split, tokenizer)):
            if number == num_samples:
                break
            cards.append(_card(where, strips))
        if cards:
            sections.append(f"<h2>{split}</h2>\n" + "\n".join(cards))
    title = html.escape(f"{folder.resolve().name}: {statistics.mode}")
    # The style is an argument, because `format` would take its braces for fields.
    page = _PAGE.format(title=title, facts=_facts(statistics), samples="\n".join(sections), style=_STYLE)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"page cannot be written: {error.strerror}",
            where=str(out),
            remedy="choose another path for --out",
        ) from error


def _samples(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, list[Strip]]]:
    """Yield the place (file and number) and the contents of each sample of a folder."""
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        for number, strips in enumerate(_file_samples(path, tokenizer)):
            yield f"{path.name}, sample {number}", strips


def _file_samples(path: Path, tokenizer: Tokenizer) -> Iterator[list[Strip]]:
    if path.suffix == ".txt":
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                ids = tokenizer.encode(line.rstrip("\n"), add_special_tokens=False).ids
                yield [Strip("text", [_token(tokenizer, token, []) for token in ids])]
    elif path.suffix == ".csv":
        table = CSVRecords(path)
        for number in range(len(table)):
            words, segments = (table.read(number, name) for name in ("tokens", "segment_ids"))
            yield [
                Strip(
                    "tokens",
                    [Token(_apart(w), f"segment {s}", group=s) for w, s in zip(words, segments, strict=True)],
                )
            ]
    else:
        with h5py.File(path) as file:
            samples = CheckedSamples(file, path)
            if "data" in file:
                names = IMAGE_CHANNELS if "img_path" in file else SPAN_CHANNELS
                for number in range(len(file["data"])):
                    yield [_row(samples.read("data", number), names, tokenizer)]
            else:
                for number in range(file.attrs["n_examples"]):
                    fields = {name: samples.read(name, number) for name in file}
                    yield _fields(fields, tokenizer)


def _row(sample: npt.NDArray[np.int32], names: Sequence[str], tokenizer: Tokenizer) -> Strip:
    """Return a strip of tokens for a sample of rows [channels, length]."""
    channels = dict(zip(names, sample, strict=False))
    ids, mask, labels = (channels[name] for name in SPAN_CHANNELS[:3])
    span, positions = (channels.get(name) for name in SPAN_CHANNELS[3:])
    last = int(np.flatnonzero(mask).max(initial=-1))
    tokens, group = [], -1
    for place, token in enumerate(ids):
        about = [f"place {place}"]
        if span is not None and positions is not None:
            group += positions[place] == 0
            about += [f"position {positions[place]}", f"seen by the next {span[place]}"]
        counts = bool(mask[place])
        label = _word(tokenizer, int(labels[place]))
        about.append(f"label {label!r} ({labels[place]})" if counts else "label does not count")
        tokens.append(_token(tokenizer, int(token), about, counts, place > last, max(int(group), 0)))
    return Strip("input_ids", tokens)


def _fields(sample: dict[str, npt.NDArray[np.int32]], tokenizer: Tokenizer) -> list[Strip]:
    """Return a strip of tokens for each text of a sample of named fields."""
    strips = []
    for name in sorted(sample):
        if not name.endswith("input_ids"):
            continue
        prefix = name.removesuffix("input_ids")
        texts = sample[name].reshape(-1, sample[name].shape[-1])
        masks = sample[f"{prefix}attention_mask"].reshape(texts.shape)
        for number, (ids, mask) in enumerate(zip(texts, masks, strict=True)):
            title = name if len(texts) == 1 else f"{name}, {number}"
            answers = _answers(sample, prefix)
            types = sample.get(f"{prefix}token_type_ids", np.zeros_like(texts)).reshape(texts.shape)[number]
            strips.append(Strip(title, _field_tokens(tokenizer, ids, mask, types, answers)))
    plain = [f"{name} {value}" for name, value in sorted(sample.items()) if np.ndim(value) == 0]
    return strips + ([Strip(", ".join(plain), [])] if plain else [])


def _answers(sample: dict[str, npt.NDArray[np.int32]], prefix: str) -> dict[int, int]:
    """Return position -> label, for the labels that count in the loss."""
    labels = sample.get(f"{prefix}labels")
    if labels is not None and np.ndim(labels):  # a single number is the class of the whole text
        return {int(place): int(labels[place]) for place in np.flatnonzero(labels >= 0)}
    names = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    if not all(name in sample for name in names):
        return {}
    triples = zip(*(sample[name] for name in names), strict=True)
    return {int(place): int(answer) for place, answer, weight in triples if weight}


def _field_tokens(
    tokenizer: Tokenizer,
    ids: npt.NDArray[np.int32],
    mask: npt.NDArray[np.int32],
    types: npt.NDArray[np.int32],
    answers: dict[int, int],
) -> list[Token]:
    tokens = []
    for place, token in enumerate(ids):
        about = [f"place {place}"]
        if place in answers:
            about.append(f"label {_word(tokenizer, answers[place])!r} ({answers[place]})")
        counts, padding = place in answers, not mask[place]
        tokens.append(_token(tokenizer, int(token), about, counts, padding, int(types[place])))
    return tokens


def _token(
    tokenizer: Tokenizer,
    token: int,
    about: Sequence[str],
    counts: bool = False,
    padding: bool = False,
    group: int = 0,
) -> Token:
    return Token(_word(tokenizer, token), ", ".join([f"token {token}", *about]), counts, padding, group)


def _word(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token. For a part of a character, return the token's name in the tokenizer."""
    word = str(tokenizer.decode([token], skip_special_tokens=False))
    if isinstance(tokenizer.model, models.WordPiece):
        return _apart(word)
    return word if word and "\ufffd" not in word else str(tokenizer.id_to_token(token) or f"#{token}")


def _apart(word: str) -> str:
    """Return a WordPiece token with a space before it, unless it continues a word (`##`)."""
    return word if word.startswith("##") else f" {word}"


def _card(where: str, strips: Sequence[Strip]) -> str:
    parts = [f"<article><h3>{html.escape(where)}</h3>"]
    for strip in strips:
        counted = sum(token.counts for token in strip.tokens)
        padding = sum(token.padding for token in strip.tokens)
        size = f"{len(strip.tokens)} tokens, {counted} in the loss, {padding} padding" if strip.tokens else ""
        parts.append(f'<p class="name">{html.escape(strip.title)} <small>{size}</small></p>')
        # The padding at the end is shown as a number: its tokens are all the same.
        shown = strip.tokens[: len(strip.tokens) - _trailing_padding(strip.tokens)]
        hidden = len(strip.tokens) - len(shown)
        more = f'<span class="p">… and {hidden} padding tokens</span>' if hidden else ""
        if strip.tokens:
            parts.append(f'<p class="t">{"".join(map(_span, shown))}{more}</p>')
    return "\n".join([*parts, "</article>"])


def _trailing_padding(tokens: Sequence[Token]) -> int:
    count = 0
    while count < len(tokens) and tokens[-1 - count].padding:
        count += 1
    return count


def _span(token: Token) -> str:
    classes = (
        f"g{token.group % _TEXT_COLOURS}" + (" l" if token.counts else "") + (" p" if token.padding else "")
    )
    text = html.escape(token.text).replace("\n", "<i>⏎</i>\n").replace("\t", "<i>⇥</i>\t")
    return f'<span class="{classes}" title="{html.escape(token.about)}">{text}</span>'


def _facts(statistics: Statistics) -> str:
    facts = {
        "documents": statistics.documents,
        "tokens": statistics.tokens,
        "vocabulary": statistics.vocab_size,
        "tokens per sample": statistics.sequence_length,
        "training samples": statistics.train_samples,
        "validation samples": statistics.val_samples,
        "labels in the loss": statistics.loss_tokens,
        "records left out": statistics.bad_records + statistics.empty_records + statistics.too_long_records,
        "records cut": statistics.cut_records,
    }
    rows = [f"<div><dt>{name}</dt><dd>{value:,}</dd></div>" for name, value in facts.items() if value]
    settings = html.escape(json.dumps(statistics.settings, indent=2, ensure_ascii=False))
    return f"<dl>{''.join(rows)}</dl><details><summary>settings</summary><pre>{settings}</pre></details>"


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #f6f7f9; --card: #fff; --dim: #8a93a3;
  --line: #dfe3ea; --h: 45%; --s: 88%; --loss: #d6336c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ef; --paper: #14181f; --card: #1c222c;
  --dim: #768196; --line: #2c3442; --h: 55%; --s: 24%; --loss: #ff7aa8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; } h2 { margin: 2rem 0 .5rem; font-size: 1.2rem; }
h3 { margin: 0; font-size: .85rem; font-weight: 600; color: var(--dim); }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 0 0 1rem; }
dt { font-size: .8rem; color: var(--dim); } dd { margin: 0; font-size: 1.1rem; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.2rem; margin: 0 0 1rem; }
.name { margin: .6rem 0 .2rem; font-size: .9rem; font-weight: 600; }
small { font-weight: 400; color: var(--dim); }
.t { margin: 0; font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.t span { border-radius: 3px; padding: 1px 0; box-shadow: inset -1px 0 var(--card);
  background: hsl(var(--c) var(--h) var(--s)); opacity: .62; }
.t span.l { opacity: 1; border-bottom: 2px solid var(--loss); }
.t span.p { background: none; color: var(--dim); }
.t span:hover { outline: 2px solid var(--loss); opacity: 1; }
.t i { color: var(--dim); font-style: normal; }
.g0 { --c: 212; } .g1 { --c: 95; } .g2 { --c: 32; } .g3 { --c: 275; } .g4 { --c: 170; } .g5 { --c: 350; }
.t.legend { white-space: normal; color: var(--dim); font-size: .9rem; }
pre { overflow: auto; font-size: .8rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
<h1>{title}</h1>
{facts}
<p class="legend t"><span class="g0 l">underlined</span>: the label counts in the loss ·
<span class="g0">pale</span>: the label does not count ·
<span class="g1">another colour</span>: another text · <span class="p">grey</span>: padding.
Point at a token to see its number, label and position.</p>
{samples}
</body>
</html>
"""
