"""Questions about texts that were not trained on: `python -m benchmarks.questions --data DIR --folder DIR`.

An encoder is trained from scratch on cloze questions made from running text (`bert/tiny_cloze`), then on real
questions (`bert/tiny_questions`), and answers those of XQuAD's last six articles. The training texts contain
no sentence of these articles. If the command was interrupted, the same command continues where it was.

The folder of data holds questions (`squad/`: `xquad_en_train`, `xquad_en_dev`, `squad_v1.1_dev_questions` and
`covid_qa_long_context`, each .json.gz), texts (`text/wikipedia_sample.txt.gz`, `text/wikitext-2/`,
`text/c4_sample.jsonl.gz`, `text/books/`) and `vocab/bert/bert-base-uncased-vocab.txt`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.options import end_on_sigterm, positive, require_files
from benchmarks.runner import print_table, save
from headwater.config import find_params, load_params
from headwater.config.data.text import QuestionDataConfig
from headwater.core.errors import ConfigError
from headwater.data.text.cloze import ClozeSettings, sentences, write_cloze_questions
from headwater.data.text.squad import Scores, read_questions, read_windows, score
from headwater.models.question_answering import QuestionAnswering
from headwater.models.registry import build_model
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.pretrained import checkpoint_weights

TRAINED = ("xquad_en_train", "squad_v1.1_dev_questions")
ASKED = "xquad_en_dev.json.gz"
NEEDED = (
    *(f"squad/{name}.json.gz" for name in (*TRAINED, "covid_qa_long_context")),
    f"squad/{ASKED}",
    "text/wikipedia_sample.txt.gz",
    "text/wikitext-2/valid.txt.gz",
    "text/wikitext-2/test.txt.gz",
    "text/c4_sample.jsonl.gz",
    "text/books/*.txt.gz",
    "vocab/bert/bert-base-uncased-vocab.txt",
)
"""The files of the folder of data."""


def lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from file


def paragraphs(data: Path) -> Iterator[str]:
    """Yield running text: encyclopedia, web pages, papers, the texts of the training questions, books."""
    for article in lines(data / "text/wikipedia_sample.txt.gz"):  # without space between paragraphs
        yield from re.sub(r"(?<=[a-z)\"])([.!?])(?=[A-Z])", r"\1\n", article).splitlines()
    for part in ("valid", "test"):
        for paragraph in lines(data / f"text/wikitext-2/{part}.txt.gz"):
            if not paragraph.startswith(" ="):
                yield joined(paragraph)
    for record in lines(data / "text/c4_sample.jsonl.gz"):
        yield from json.loads(record)["text"].splitlines()
    for name in (*TRAINED, "covid_qa_long_context"):
        for context in {
            question.context: None for question in read_questions(data / f"squad/{name}.json.gz")
        }:
            yield from context.splitlines()
    for book in sorted((data / "text/books").glob("*.txt.gz")):
        for paragraph in "".join(lines(book)).split("\n\n")[::16]:
            yield " ".join(paragraph.replace("_", "").split())


def joined(paragraph: str) -> str:
    """Return a paragraph of WikiText as it was before it was split into words."""
    text = re.sub(r" @(.)@ ", r"\1", paragraph.replace("<unk>", ""))
    text = re.sub(r"\s+([,.;:!?%)']|n't)", r"\1", re.sub(r"\(\s+", "(", text))
    return " ".join(re.sub(r'" ([^"]*) "', r'"\1"', text).split())


def prepare(args: argparse.Namespace) -> int:
    """Write the data of both trainings and return the number of cloze questions."""
    real = args.folder / "real"
    real.mkdir(parents=True, exist_ok=True)
    for name in TRAINED:
        shutil.copyfile(args.data / f"squad/{name}.json.gz", real / f"{name}.json.gz")
    held_out = sorted({question.context for question in read_questions(args.data / "squad" / ASKED)})
    cloze = args.folder / "cloze.json"
    if not cloze.exists():
        unfinished = cloze.with_suffix(".partial")
        write_cloze_questions(paragraphs(args.data), unfinished, ClozeSettings(), held_out)
        unfinished.rename(cloze)
    return len(read_questions(cloze))


def train(args: argparse.Namespace, params: str, data: Path, *more: str) -> Path:
    """Run a params file of the package with the command and return its last checkpoint.

    If the command fails, end with its exit code; it has printed its error.
    """
    model_dir = args.folder / params.replace("/", "_")
    asked = args.data / "squad" / ASKED
    keys: dict[str, object] = {
        "init.model_dir": model_dir,
        "fit.train_dataloader.data_dir": data,
        "fit.train_dataloader.held_out_dir": asked,
        "fit.val_dataloader.data_dir": asked,
        "validate.val_dataloader.data_dir": asked,
    } | {
        f"{loader}.vocab_file": args.data / "vocab/bert/bert-base-uncased-vocab.txt"
        for loader in ("fit.train_dataloader", "fit.val_dataloader", "validate.val_dataloader")
    }
    if args.max_steps is not None:
        keys["init.loop.max_steps"] = keys["init.loop.eval_frequency"] = args.max_steps
    words = [f"trainer.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "headwater", "fit", params, *words, *more]
    if code := subprocess.run(command).returncode:
        print(f"headwater fit {params} failed with exit code {code}", file=sys.stderr)
        sys.exit(code)
    return complete_checkpoints(model_dir)[-1]


def evaluate(args: argparse.Namespace, params: str, checkpoint: Path) -> Scores:
    """Return the scores of the answers by the weights of a checkpoint."""
    vocabulary = args.data / "vocab/bert/bert-base-uncased-vocab.txt"
    loader = "trainer.fit.val_dataloader"
    keys = {f"{loader}.data_dir": str(args.data / "squad" / ASKED), f"{loader}.vocab_file": str(vocabulary)}
    config = load_params(find_params(params), keys)
    model = build_model(config.init.model).eval()
    section = config.fit.val_dataloader[0] if config.fit is not None else None
    if not isinstance(model, QuestionAnswering) or not isinstance(section, QuestionDataConfig):
        raise ConfigError("expected a model and data of questions", where=params)
    model.load_state_dict(dict(checkpoint_weights(checkpoint)))
    windows = read_windows(section, model.config.vocab_size)
    with torch.no_grad():
        places = torch.arange(len(windows)).split(32)
        parts = [model.answers(windows.__getitems__(part.tolist())) for part in places]
    scores, begins, ends = (torch.cat(each).tolist() for each in zip(*parts, strict=True))
    return score(windows.answers(scores, begins, ends), windows.questions)


def first_sentences(data: Path) -> Scores:
    """Return the scores of answers that do not depend on the question."""
    questions = read_questions(data / "squad" / ASKED)
    answers = {each.identifier: each.context[slice(*sentences(each.context)[0])] for each in questions}
    return score(answers, questions)


def row(name: str, scores: Scores, seconds: float | None = None) -> dict[str, object]:
    return {
        "answers": name,
        "exact_match": round(scores.exact_match, 3),
        "f1": round(scores.f1, 3),
        "seconds": "–" if seconds is None else round(seconds),
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with squad, text and vocab")
    parser.add_argument("--folder", type=Path, required=True, help="folder for data and runs")
    parser.add_argument(
        "--max_steps", type=positive, help="steps of each training, instead of those of its file, for a trial"
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    require_files(parser, "--data", args.data, *NEEDED)
    end_on_sigterm()
    print("the data of both trainings are written to", args.folder, flush=True)
    print(f"{prepare(args):,} cloze questions", flush=True)
    start = time.monotonic()
    cloze = train(args, "bert/tiny_cloze", args.folder / "cloze.json")
    between = time.monotonic()
    real = train(args, "bert/tiny_questions", args.folder / "real", f"trainer.fit.ckpt_path={cloze}")
    end = time.monotonic()
    rows = [
        row("first sentence", first_sentences(args.data)),
        row("after cloze questions", evaluate(args, "bert/tiny_questions", cloze), between - start),
        row("after real ones too", evaluate(args, "bert/tiny_questions", real), end - between),
    ]
    print_table(rows)
    print(save("questions" if args.max_steps is None else f"questions_{args.max_steps}_steps", rows))


if __name__ == "__main__":
    main()
