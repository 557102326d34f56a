"""Import of damaged Hugging Face folders: only errors of this project may be raised.

`python -m benchmarks.fuzz_converter --count 2000` changes config.json, the index or the header of weights at
random, imports each folder, and prints the outcome. The exit code is 1 if another error is raised, or an
import takes more than two seconds.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.core.errors import HeadwaterError
from headwater.models.registry import build_model

_SECONDS = 2.0
_SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
_SECTIONS: tuple[dict[str, Any], ...] = (
    {"name": "gpt2", **_SIZES, "max_position_embeddings": 8},
    {"name": "llama", **_SIZES, "max_position_embeddings": 8},
    {"name": "mixtral", **_SIZES, "moe": {"num_experts": 2, "top_k": 1}},
    {"name": "gpt-neox", **_SIZES, "rotary_dim": 4},
    {"name": "bert", **_SIZES, "max_position_embeddings": 8},
    {"name": "t5", "src_vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    | {"encoder_num_hidden_layers": 1},
)
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 7, 1 << 31, 1 << 62, 1e30, -1e30, 0.5, 1e-300, "", "x", "16", "gelu", [],
    [0], ["a", "b"], [[]], {}, {"a": 1}, {"rope_type": "linear"}, [1] * 1000, "y" * 5000,
)  # fmt: skip


def folders(root: Path) -> list[Path]:
    """Write an undamaged folder for each of some models."""
    from headwater.config.models import MODELS

    made = []
    for section in _SECTIONS:
        config = MODELS[section["name"]].model_validate(section)
        folder = root / section["name"]
        export_hf(dict(build_model(config).state_dict()), config, folder)
        made.append(folder)
    return made


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    if len(path) == 1 and drop:
        del value[path[0]]
    else:
        value[path[0]] = _replaced(value[path[0]], path[1:], new, drop=drop)
    return value


def _mutated(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one to three parts replaced or removed."""
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(_places(value)))
        value = _replaced(value, path, rng.choice(_ODD), drop=rng.random() < 0.2)
    return value


def _mutated_text(value: Any, rng: random.Random) -> bytes:
    """Return a file of JSON: usually with other values, sometimes not JSON at all."""
    kind = rng.random()
    if kind < 0.85:
        return json.dumps(_mutated(value, rng)).encode()
    text = json.dumps(value).encode()
    if kind < 0.9:
        depth = rng.choice((100, 3_000, 100_000))
        return b"[" * depth + b"]" * depth
    if kind < 0.93:
        return b'{"vocab_size": ' + b"9" * 5_000 + b"}"
    if kind < 0.96:
        return text[: rng.randrange(len(text))]
    position = rng.randrange(len(text))
    return text[:position] + bytes([rng.randrange(256)]) + text[position + 1 :]


def damage(source: Path, target: Path, rng: random.Random) -> None:
    """Write a damaged copy of a folder."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    weights = (source / "model.safetensors").read_bytes()
    kind = rng.random()
    if kind < 0.6:
        (target / "config.json").write_bytes(_mutated_text(config, rng))
        (target / "model.safetensors").write_bytes(weights)
        return
    (target / "config.json").write_text(json.dumps(config))
    if kind < 0.85:
        length = int.from_bytes(weights[:8], "little")
        header = _mutated_text(json.loads(weights[8 : 8 + length]), rng)
        size = rng.choice((len(header), len(header), len(header), 0, length, 1 << 62))
        (target / "model.safetensors").write_bytes(
            size.to_bytes(8, "little") + header + weights[8 + length :]
        )
    elif kind < 0.95:
        save_file({"a": torch.zeros(2)}, target / "part.safetensors")
        index = {"metadata": {}, "weight_map": {"a": "part.safetensors"}}
        (target / "model.safetensors.index.json").write_bytes(_mutated_text(index, rng))
    else:
        position = rng.randrange(len(weights))
        (target / "pytorch_model.bin").write_bytes(
            rng.choice((weights, b"", weights[:position], b"PK\3\4" + weights))
        )


def outcome(folder: Path) -> str:
    """Import a folder and return how that ended."""
    try:
        for _ in import_hf(folder)[1]:
            pass
    except HeadwaterError as error:
        return type(error).__name__
    except BaseException as error:  # noqa: BLE001 (the fuzzer looks for all other errors)
        return f"RAW {type(error).__name__}: {error}"[:200]
    return "a model"


def run(seed: int, count: int) -> tuple[collections.Counter[str], list[str]]:
    """Import `count` damaged folders; return the outcomes, and the unexpected ones."""
    ended: collections.Counter[str] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory() as scratch:
        sound = folders(Path(scratch))
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            folder = Path(scratch) / str(number)
            damage(rng.choice(sound), folder, rng)
            start = time.process_time()
            found = outcome(folder)
            ended[found.split(":")[0]] += 1
            if found.startswith("RAW") or time.process_time() - start > _SECONDS:
                bad.append(f"{seed}/{number}: {found}, {time.process_time() - start:.1f} s")
    return ended, bad


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    args = make_parser().parse_args()
    ended, bad = run(args.seed, args.count)
    for name, count in ended.most_common():
        print(f"{count:6} {name}")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
