"""`headwater batch`: answer the requests of a file with language models."""

from __future__ import annotations

import argparse
from pathlib import Path

from headwater.cli.serve import add_served_models, open_service
from headwater.core.files import check_place
from headwater.core.patience import notice_if_long
from headwater.core.units import counted
from headwater.serving.batch import answer_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater batch`."""
    parser.description = (
        "Answer the requests of a file. Each line is a JSON object as in the Cerebras-GPT model card "
        "(input_data, params) or in OpenAI's batch files (custom_id, method, url, body). The same command "
        "continues a run that was killed."
    )
    parser.usage = "headwater batch [-h] REQUESTS [NAME=]FOLDER ... [--output FILE] [--option VALUE ...]"
    parser.add_argument(
        "requests", type=Path, metavar="REQUESTS", help="file with a JSON request in each line"
    )
    add_served_models(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file of the answers (REQUESTS, ending in .answers.jsonl)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer all requests; return 1 if some could not be answered."""
    output = args.output or args.requests.with_suffix(".answers.jsonl")
    check_place(output, expected="a file")
    with open_service(args) as service, notice_if_long("answering requests") as activity:

        def show_progress(count: int) -> None:
            activity.name = f"answering requests: {count} answers written"

        errors = answer_file(service, args.requests, output, show_progress)
    print(f"answers: {output}")
    if errors:
        print(f"{counted(errors, 'request', 'requests')} could not be answered; see the answers")
    return 1 if errors else 0
