"""Malformed requests to a shared queue: `python tests/appliance/request_fuzz.py --count 2000`.

Prints how many were answered in which way, and the slowest. Each must get an answer, and every error must be
one of the project's own.
"""

import argparse
import json
import random
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

from headwater.appliance.folder import QueueFolder
from headwater.appliance.open import prepare
from headwater.appliance.server import serving, socket_address
from headwater.core import errors

_SUBMISSION = {
    "command": ["true"],
    "folder": "/tmp",
    "environment": {"A": "b"},
    "num_csx": 1,
    "model_dir": None,
    "priority": "p2",
    "labels": {"team": "a"},
    "umask": 18,
}
_JOB = "wsjob-000000000001"
_REQUESTS = [
    {"ask": "submit", "submission": _SUBMISSION, "token": "t"},
    {"ask": "jobs", "everything": True},
    {"ask": "show", "name": _JOB},
    {"ask": "cancel", "name": _JOB},
    {"ask": "label", "name": _JOB, "labels": {"a": "b", "team": None}},
    {"ask": "set_priority", "name": _JOB, "priority": "p1"},
    {"ask": "num_csx"},
]
_ODD = [
    None, True, -1, 0, 2**31, 2**63, 10**30, -(2**63) - 1, 1e308, float("nan"), "", "\0", "\ud800", "é" * 300,
    "x" * 100_000, "wsjob-" + "9" * 40, "wsjob-" + "9" * 5000, "wsjob-", "wsjob-٣", "0", "00000", [], [[]],
    {}, {"a": {"b": []}}, {"": ""}, {"a": 1}, {"\ud800": "x"}, ["true", 3], ["\0"], "../../etc/passwd",
    "p9", "/" * 5000, [None] * 1000, {str(number): "x" for number in range(2000)},
]  # fmt: skip


def malformed(count, seed=0):
    """Yield requests that are wrong in some way, as bytes without the end of the line."""
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.choice([_changed, _changed, _changed, _damaged, _nested, _noise])(generator)


def _changed(generator):
    """A request with another value in one or two places, or with a field more or less."""
    request = json.loads(json.dumps(generator.choice(_REQUESTS)))
    for _ in range(generator.randint(1, 2)):
        place = request
        if isinstance(request.get("submission"), dict) and generator.random() < 0.8:
            place = request["submission"]
        key = generator.choice([*place, "uid", "another"])
        if generator.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = generator.choice(_ODD)
    return json.dumps(request).encode()


def _damaged(generator):
    """The bytes of a request with some of them changed, cut off or repeated."""
    data = bytearray(json.dumps(generator.choice(_REQUESTS)).encode())
    for _ in range(generator.randint(1, 5)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    return bytes(data[: generator.randint(1, len(data))] * generator.randint(1, 3)).replace(b"\n", b" ")


def _nested(generator):
    """Deep nesting, or a number of many digits, as the request or inside it."""
    depth = generator.choice([100, 3000, 100_000])
    value = generator.choice(["[" * depth, "[" * depth + "]" * depth, '{"a":' * depth, "1" * depth])
    return (
        generator.choice(["%s", '{"ask": %s}', '{"ask": "label", "name": "1", "labels": %s}'])
        .replace("%s", value)
        .encode()
    )


def _noise(generator):
    return generator.randbytes(generator.choice([0, 1, 7, 1000, 50_000])).replace(b"\n", b"")


def ask(folder, request):
    """Send a request; return the reply, as bytes."""
    with socket.socket(socket.AF_UNIX) as connection, socket_address(folder) as address:
        connection.settimeout(60)
        connection.connect(address)
        connection.sendall(request + b"\n")
        with connection.makefile("rb") as file:
            return file.readline()


def kind_of(reply):
    """Return the kind of a reply: the name of an exception of the project, or `answer`."""
    told = json.loads(reply)
    if told.keys() == {"answer"}:
        return "answer"
    assert told.keys() == {"error"}, told
    kind = getattr(errors, told["error"]["kind"])
    assert issubclass(kind, errors.HeadwaterError), kind
    return kind.__name__


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kinds, slowest = Counter(), (0.0, b"")
    with tempfile.TemporaryDirectory() as place:
        folder = QueueFolder(Path(place) / "queue")
        prepare(folder, num_csx=2, shared=True)
        with serving(folder):
            for request in malformed(args.count, args.seed):
                start = time.monotonic()
                kinds[kind_of(ask(folder, request))] += 1
                slowest = max(slowest, (time.monotonic() - start, request[:80]))
    print(dict(kinds), f"slowest: {slowest[0]:.2f} s, {slowest[1]!r}")


if __name__ == "__main__":
    main()
