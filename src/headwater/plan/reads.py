"""Reads of weights in a dry run: the order in which stages are used, and the modules that read them."""

from __future__ import annotations

from typing import final

from headwater.plan.partition import Partition


@final
class WeightReads:
    """The modules whose forward runs now, and the stages whose weights each module has read.

    Attributes:
        running: stages whose modules run, from the outermost inward.
        uses: stages in the order of their use; a use ends when another stage is read.

    Args:
        partition: the stages, and the module of each.
    """

    def __init__(self, partition: Partition) -> None:
        self.running: list[int] = []
        self.uses: list[int] = []
        self._units = partition.units
        self._stages = partition.stages
        self._modules: list[str] = []  # qualified names of the modules whose forward runs
        self._sites: dict[str, set[int]] = {}

    def enter(self, path: str, stage: int | None) -> None:
        """Begin the forward of a module; `stage` is the stage that consists of this module, or `None`."""
        self._modules.append(path)
        if stage is not None:
            self.running.append(stage)

    def leave(self, stage: int | None) -> None:
        """End the forward of the innermost module; `stage` is the argument that `enter` got for it."""
        self._modules.pop()
        if stage is not None:
            self.running.pop()

    def read(self, stage: int) -> bool:
        """Record that the running module reads a parameter; return False if no module runs.

        Outside of all forwards, a parameter is read from the store.
        """
        if not self._modules:
            return False
        path = self._units[stage].path
        # While its own module runs, a stage is bound there once, not by each part that reads it.
        site = path if path in self._modules else self._modules[-1]
        self._sites.setdefault(site, set()).add(stage)
        self.use(stage)
        return True

    def use(self, stage: int) -> None:
        """Record a use of a stage. Reads of the same stage one after the other are one use.

        A layer reads its weight, which is a part of a divided block, and its bias, which is in the stage
        around the part. Reads of both in turn are one use of the part.
        """
        around = self._stages[stage].part_of
        if around is not None and self.uses[-2:] == [stage, around]:
            self.uses.pop()
        if not self.uses or self.uses[-1] != stage:
            self.uses.append(stage)

    def take_over(self, stage: int, original: int, path: str, old: str) -> None:
        """Record for `stage`, which did not run, the reads of the equal stage `original`.

        Args:
            stage: the stage.
            original: the stage that has run.
            path: the module of the stage, or of the divided block around it.
            old: the module of the original, or of the divided block around it.
        """
        for site in [site for site, stages in self._sites.items() if original in stages]:
            self._sites.setdefault(path + site.removeprefix(old), set()).add(stage)

    def sites(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that each module reads. A stage without reads is listed at its own module."""
        sites = {path: set(stages) for path, stages in self._sites.items()}
        for index, unit in enumerate(self._units):
            sites.setdefault(unit.path, set()).add(index)
        return {path: tuple(sorted(stages)) for path, stages in sites.items()}
