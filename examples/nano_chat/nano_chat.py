"""From a text to a small chat model, with one command:

    python examples/nano_chat/nano_chat.py                       # on the novel that ships with Headwater
    python examples/nano_chat/nano_chat.py --text my_book.txt

It trains a tokenizer and a GPT on the text, makes conversations and preferences of the text, trains on these,
evaluates every stage, and writes report.html. The same command again continues where it stopped.
"""

import argparse
import gzip
import importlib.resources
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from pairs import CONTINUE, MENTION, conversations, held_out, mentions, preferences, sentences
from report import Answer, Stage, write_report

from headwater.cli.main import main as headwater_command

HERE = Path(__file__).resolve().parent
VOCABULARY, LENGTH = 2048, 128
STEPS = {"pretrain": 600, "instruct": 300, "prefer": 60}
"""Steps of each stage. The last one is direct preference optimization (DPO)."""
HELD_OUT = 0.05
"""Fraction of the text, at its end, that no stage trains on."""
TOKENS = 48
"""Most tokens of an answer."""


def headwater(*words: object) -> None:
    """Run a command of Headwater in a new process. If it fails, exit with its code."""
    print("\n$ headwater", *words, flush=True)
    if code := subprocess.run([sys.executable, "-m", "headwater", *map(str, words)]).returncode:
        raise SystemExit(code)


def divide(text: Path | None, folder: Path) -> None:
    """Write the beginning of the text for training, and its end for evaluations.

    A folder belongs to one text, whose path is in `source.txt`.
    """
    shipped = Path(str(importlib.resources.files("headwater"))) / "assets/text/great_expectations.txt.gz"
    source, note = (text or shipped).absolute(), folder / "source.txt"
    if note.exists() and note.read_text() != str(source):
        raise SystemExit(
            f"expected the text of {folder}, {note.read_text()}, got {source}\n"
            "name another --folder, or write the first text with --text"
        )
    if (folder / "held_out.txt").exists():
        return
    data = source.read_bytes()
    content = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    place = content.rindex("\n", 0, round(len(content) * (1 - HELD_OUT)))
    note.write_text(str(source))
    (folder / "text.txt").write_text(content[:place])
    (folder / "held_out.txt").write_text(content[place:])


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write a JSON Lines file and return its path."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def prepare(folder: Path) -> None:
    """Train the tokenizer, and prepare the data of each stage."""
    found = sentences((folder / "text.txt").read_text())
    data, size = folder / "data", ("--sequence_length", LENGTH)
    tokenizer = ("--tokenizer", data / "pretrain" / "tokenizer.json", *size)
    if not (data / "pretrain" / "statistics.json").exists():
        headwater("data", folder / "text.txt", "--vocab_size", VOCABULARY, *size, "--out", data / "pretrain")
    if not (data / "instruct" / "statistics.json").exists():
        talks = write_records(folder / "instruct.jsonl", conversations(found, seed=1))
        # Conversations are short: without `--use_vsl`, more than half of all positions would be empty.
        packed = ("--mode", "chat", "--use_vsl")
        headwater("data", talks, *packed, *tokenizer, "--out", data / "instruct")
    if not (data / "prefer" / "statistics.json").exists():
        choices = write_records(folder / "prefer.jsonl", preferences(found, seed=2))
        headwater("data", choices, "--mode", "preference", *tokenizer, "--out", data / "prefer")


def train(name: str, folder: Path, steps: int, start: str | None) -> float:
    """Train a stage and return the minutes that its steps have taken, also those of earlier calls.

    Args:
        name: name of the stage and of its params file.
        folder: folder of all stages.
        steps: its last step.
        start: the stage with whose weights it starts.
    """
    data = folder / "data" / name
    loaders = ("fit.train_dataloader", "fit.val_dataloader", "validate.val_dataloader")
    places = [f"trainer.{key}.data_dir={data / ('train' if 'train' in key else 'val')}" for key in loaders]
    rate = {"pretrain": 3e-3, "instruct": 1e-3, "prefer": 1e-4}[name]
    warmup = max(1, steps // 20)
    rise = {"initial_learning_rate": 0.0, "end_learning_rate": rate, "total_iters": warmup}
    fall = {"initial_learning_rate": rate, "end_learning_rate": rate / 10, "total_iters": steps - warmup}
    sequence = [{"LinearLR": rise}, {"CosineDecayLR": fall}]
    places.append(f"trainer.init.schedulers={json.dumps([{'SequentialLR': {'schedulers': sequence}}])}")
    if start is not None:
        newest = max((folder / start).glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
        places.append(f"trainer.fit.ckpt_path={newest}")
    headwater("fit", HERE / f"{name}.yaml", "--model_dir", folder / name, "--max_steps", steps, *places)
    records = map(json.loads, (folder / name / "history.jsonl").read_text().splitlines())
    return sum(float(record["step_s"]) for record in records if record["kind"] == "train") / 60


def answer(model_dir: Path, message: str, seed: int) -> str:
    """Return an answer to a message, always the same one for the same seed."""
    words = ["--model_dir", str(model_dir), "--prompt", message, "--chat", "--temperature", "0.6"]
    words += ["--max_new_tokens", str(TOKENS), "--seed", str(seed)]
    output = io.StringIO()
    with redirect_stdout(output):
        code = headwater_command(["generate", *words])
    if code:
        raise SystemExit(code)
    return output.getvalue().strip()


def evaluate(folder: Path, name: str) -> float:
    """Return the bits per byte of a stage's model on the text that was held out."""
    result = folder / name / "held_out.json"
    headwater("evaluate", folder / name, "--text", folder / "held_out.txt", "--output_path", result)
    return float(json.loads(result.read_text())["all"]["bits_per_byte"])


def ask(folder: Path, count: int) -> list[Answer]:
    """Ask both tuned models about `count` words that no data asked for, and to continue two new sentences."""
    words = held_out(sentences((folder / "text.txt").read_text()))[:count]
    begun = [each.split() for each in sentences((folder / "held_out.txt").read_text())[:2]]
    asked = [(MENTION.format(word), word) for word in words]
    asked += [(CONTINUE.format(" ".join(each[: len(each) // 2])), None) for each in begun]
    answers = []
    for seed, (message, word) in enumerate(asked):
        texts = {name: answer(folder / name, message, seed) for name in ("instruct", "prefer")}
        kept = {name: word is None or mentions(text, word) for name, text in texts.items()}
        answers.append(Answer(message, word, texts, kept))
    return answers


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, help="text to learn, .txt or .txt.gz (a novel that ships)")
    parser.add_argument("--folder", type=Path, default=Path("runs/nano_chat"), help="(%(default)s)")
    parser.add_argument("--steps", type=int, nargs=3, default=tuple(STEPS.values()), help="of each stage")
    parser.add_argument("--questions", type=int, default=20, help="questions of the evaluation (%(default)s)")
    args = parser.parse_args(words)
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    divide(args.text, folder)
    prepare(folder)
    stages, start = [], None
    for name, steps in zip(STEPS, args.steps, strict=True):
        minutes = train(name, folder, steps, start)
        stages.append(Stage(name, steps, minutes, evaluate(folder, name), folder / name))
        # The preferences start from the plain decoder of the conversations.
        start = name
    page = write_report(folder / "report.html", stages, ask(folder, args.questions))
    print(f"\nreport: {page}")
    print(f"to chat in a browser: headwater serve {folder / 'prefer'}")
    print(f"to chat here: headwater generate --chat --model_dir {folder / 'prefer'} --prompt MESSAGE")


if __name__ == "__main__":
    main()
