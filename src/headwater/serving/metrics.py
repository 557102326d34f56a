"""Counters of a server in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import final

from headwater.serving.filling import ServedFiller
from headwater.serving.writing import ServedModel

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper limits of the histograms, seconds."""


@final
class Histogram:
    """Numbers of events by their duration."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self._counts = [0] * len(_BUCKETS)

    def add(self, seconds: float) -> None:
        """Count an event."""
        self.total += seconds
        self.count += 1
        for place, limit in enumerate(_BUCKETS):
            self._counts[place] += seconds <= limit

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the histogram."""
        for limit, count in zip(_BUCKETS, self._counts, strict=True):
            yield f'{name}_bucket{{le="{limit}"}} {count}'
        yield f'{name}_bucket{{le="+Inf"}} {self.count}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {self.count}"


@final
class Metrics:
    """Counters of requests and tokens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[tuple[str, str]] = Counter()
        self._seconds = Histogram()
        self._first_seconds = Histogram()
        self._disconnects = 0

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request and how long it took."""
        with self._lock:
            self._requests[path, status] += 1
            self._seconds.add(seconds)

    def first_text(self, seconds: float) -> None:
        """Count a streamed answer and how long its first piece took."""
        with self._lock:
            self._first_seconds.add(seconds)

    def used(self, model: str, prompt: int, generated: int) -> None:
        """Count the tokens of a request."""
        with self._lock:
            self._tokens[model, "prompt"] += prompt
            self._tokens[model, "generated"] += generated

    def disconnected(self) -> None:
        """Count a request whose client has left before its end."""
        with self._lock:
            self._disconnects += 1

    def text(self, models: Mapping[str, ServedModel | ServedFiller]) -> str:
        """Return all counters, and the state of the models."""
        with self._lock:
            lines = [
                *_family("requests_total", "counter", "Requests by path and status code.",
                         (f'{{path="{path}",status="{status}"}} {count}'
                          for (path, status), count in sorted(self._requests.items()))),
                *_family("tokens_total", "counter", "Tokens of prompts, and generated tokens.",
                         (f'{{model="{_escaped(model)}",kind="{kind}"}} {count}'
                          for (model, kind), count in sorted(self._tokens.items()))),
                *_family("disconnects_total", "counter", "Requests whose client left before the end.",
                         [f" {self._disconnects}"]),
                "# HELP headwater_request_seconds Seconds from a request to the end of its answer.",
                "# TYPE headwater_request_seconds histogram",
                *self._seconds.lines("headwater_request_seconds"),
                "# HELP headwater_first_text_seconds Seconds from a request to the first piece of a stream.",
                "# TYPE headwater_first_text_seconds histogram",
                *self._first_seconds.lines("headwater_first_text_seconds"),
            ]  # fmt: skip
        for name, kind, meaning, value in _STATES:
            found = (f'{{model="{_escaped(model.name)}"}} {value(model)}' for model in models.values())
            lines += _family(name, kind, meaning, found)
        return "\n".join(lines) + "\n"


_STATES = (
    ("passes_total", "counter", "Passes over the weights.", lambda model: model.worker.passes),
    ("active_sequences", "gauge", "Sequences that are computed.", lambda model: model.worker.active),
    (
        "waiting_requests",
        "gauge",
        "Texts that wait for memory of keys and values.",
        lambda model: model.worker.waiting,
    ),
    (
        "cache_tokens",
        "gauge",
        "Tokens with memory for keys and values.",
        lambda model: model.worker.used_cache_tokens,
    ),
    (
        "cache_limit_tokens",
        "gauge",
        "Most tokens with memory for keys and values.",
        lambda model: model.worker.cache_limit_tokens,
    ),
    ("model_up", "gauge", "1 if the model answers.", lambda model: int(model.worker.error is None)),
)


def _family(name: str, kind: str, meaning: str, samples: Iterable[str]) -> list[str]:
    full = f"headwater_{name}"
    return [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *(f"{full}{each}" for each in samples)]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
