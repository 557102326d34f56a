"""`python -m headwater.run --params P --mode train`: the documents' spelling of `fit` and `validate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headwater.cli.main import guarded

MODES = ("train", "eval", "train_and_eval")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in the documents' spelling; exit codes are those of `headwater.cli.main.main`."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    from headwater.cli import fit, validate
    from headwater.cli.arguments import Parser, add_override_options, overrides, read_params

    parser = Parser(prog="python -m headwater.run", description="Train or evaluate as a params file says.")
    parser.add_argument("--params", required=True, metavar="PARAMS", help="params file")
    parser.add_argument(
        "--mode", required=True, choices=MODES, help="train_and_eval evaluates in between too"
    )
    add_override_options(parser)
    args, rest = parser.parse_known_args(words)
    args.overrides = [*args.flags, *overrides(parser, rest)]
    if args.mode == "eval":
        return validate.evaluate(read_params(args))
    if args.mode == "train":
        args.overrides.append("eval_frequency=0")
    return fit.train(read_params(args))


if __name__ == "__main__":
    raise SystemExit(main())
