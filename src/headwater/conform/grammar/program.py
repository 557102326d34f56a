"""Random programs: each consists of pieces, is written as Python source, and can be simplified."""

from __future__ import annotations

import dataclasses
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

WIDTH = 6
"""Size of the last dimension of the hidden state [4, 3, WIDTH], which every layer takes and returns."""

TOKENS = 11
"""Size of the vocabulary of a program's tokens."""

KEPT = "kept "
"""Prefix of names of recorded values that share memory with a weight; see `StaleTensorWarning`."""

Choices = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of one piece: the lines of Python that it adds to each part of a program.

    Attributes:
        top: lines before the model's class.
        init: lines in the model's `__init__`.
        forward: lines in the model's `forward`; they change the hidden state `x`, and may read `tokens`.
        setup: lines of the run before the `model` is compiled.
        begin: lines of the run that use the compiled `model` and its `optimizer`.
        batch: lines of a step before the forward.
        loss: lines of a step after the forward; they may change `loss`.
        gradients: lines of a step between backward and the optimizer's step.
        end: lines of a step after the optimizer's step.
        squares: attributes of the model that are `nn.Linear(WIDTH, WIDTH)`, for other pieces to refer to.
    """

    top: str = ""
    init: str = ""
    forward: str = ""
    setup: str = ""
    begin: str = ""
    batch: str = ""
    loss: str = ""
    gradients: str = ""
    end: str = ""
    squares: tuple[str, ...] = ()


Writer = Callable[..., Any]
"""Function (number, targets, choices) -> the code of a piece; for settings, the whole source."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of piece of a random program: it uses one feature of PyTorch, such as a shared weight.

    Attributes:
        name: name of the feature.
        write: returns the code of a piece.
        options: values of each choice, the simplest first.
        targets: layers of other pieces that the piece refers to.
        in_loop: True if it is a feature of the training loop, not of the model.
    """

    name: str
    write: Writer
    options: Mapping[str, Sequence[Any]]
    targets: int = 0
    in_loop: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a random program that uses one feature.

    Attributes:
        kind: the feature.
        number: distinguishes its names from those of other pieces.
        choices: a value for each option of its kind.
        targets: positions in the list of layers that it refers to.
    """

    kind: Kind
    number: int
    choices: Choices
    targets: tuple[int, ...] = ()

    def simpler(self) -> Iterator[Piece]:
        """Yield this piece with one choice replaced by each simpler value, or with other targets."""
        for name, values in self.kind.options.items():
            for value in values[: list(values).index(self.choices[name])]:
                yield dataclasses.replace(self, choices={**self.choices, name: value})
        for index, target in enumerate(self.targets):
            for smaller in range(target):
                targets = (*self.targets[:index], smaller, *self.targets[index + 1 :])
                yield dataclasses.replace(self, targets=targets)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model and the loop that trains it.

    Attributes:
        seed: seed of the initial values and the batches.
        settings: a piece whose code is the loop; see `settings.py`.
        pieces: the features, in the order of their code.
        autocast: the dtype of the autocast around forwards and losses, a name of torch; `None`: no autocast.
    """

    seed: int
    settings: Piece
    pieces: tuple[Piece, ...]
    autocast: str | None = None

    def without(self, *dropped: Piece) -> Program:
        """Return the program without these pieces."""
        return dataclasses.replace(self, pieces=tuple(each for each in self.pieces if each not in dropped))

    def simpler(self) -> Iterator[Program]:
        """Yield programs that are one step simpler, the largest steps first."""
        half = len(self.pieces) // 2
        if half > 1:
            yield self.without(*self.pieces[:half])
            yield self.without(*self.pieces[half:])
        for piece in self.pieces:
            yield self.without(piece)
        for settings in self.settings.simpler():
            yield dataclasses.replace(self, settings=settings)
        for index, piece in enumerate(self.pieces):
            for simple in piece.simpler():
                pieces = (*self.pieces[:index], simple, *self.pieces[index + 1 :])
                yield dataclasses.replace(self, pieces=pieces)

    def features(self) -> tuple[str, ...]:
        """Return the names of the features that the program uses."""
        return tuple(piece.kind.name for piece in self.pieces)

    def source(self) -> str:
        """Return the program as Python source that defines `run(compile, show)`."""
        codes = [*_codes(self.pieces)]
        parts = {
            field.name: [text for code in codes if (text := getattr(code, field.name))]
            for field in dataclasses.fields(Code)
            if field.name != "squares"
        }
        source: str = self.settings.kind.write(self.seed, parts, self.autocast, **self.settings.choices)
        return source


def _codes(pieces: Sequence[Piece]) -> Iterator[Code]:
    """Yield the code of each piece; a piece refers to layers of the pieces before it."""
    squares = ["first"]
    for piece in pieces:
        targets = [squares[target % len(squares)] for target in piece.targets]
        code = piece.kind.write(piece.number, *targets, **piece.choices)
        squares.extend(code.squares)
        yield code


def indented(texts: Sequence[str], depth: int) -> str:
    """Return code indented by exactly `depth` levels, whatever its indentation was."""
    return "".join(textwrap.indent(dedented(text) + "\n", "    " * depth) for text in texts)


def dedented(text: str) -> str:
    """Return code without common indentation and surrounding blank lines."""
    return textwrap.dedent(text).strip("\n").rstrip()


def draw_piece(generator: random.Random, kind: Kind, number: int) -> Piece:
    """Return a piece of this kind with random choices."""
    choices = {name: generator.choice(list(values)) for name, values in kind.options.items()}
    return Piece(kind, number, choices, tuple(generator.randrange(6) for _ in range(kind.targets)))
