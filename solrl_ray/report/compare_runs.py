"""``solrl report`` of several runs: which reached a held-out reward when, and in how many times fewer GPU-hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from solrl_ray.common.output import plain_table
from solrl_ray.config.problems import listed
from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.report.curve import SHARES, Curve
from solrl_ray.report.data import RunData, read_run
from solrl_ray.report.rendering import digits


@dataclass(frozen=True, slots=True)
class Compared:
    """A run compared with the first one."""

    run: RunData
    name: str
    """Made unique by its folder, if needed."""
    curve: Curve
    reference: Curve
    """The first run's."""
    comparable: bool = True
    """Its held-out rewards measure what the first run's do."""

    @property
    def line(self) -> list[str]:
        """Cells of its row, as `header`."""
        points, rollout = self.curve.points, self.run.config.rollout
        chosen = f"{rollout.strategy}, {rollout.keep} of {rollout.pool}"
        reward = f"{digits(points[0].reward)} → {digits(points[-1].reward)} after {points[-1].updates:g}"
        return [self.name, self.run.config.objective.kind, chosen, reward, *map(self._reached, SHARES)]

    def _reached(self, share: float) -> str:
        """When it had this share of the reference's gain, and how many times less time that took, or GPU-hours if both
        have GPUs.
        """
        if not self.comparable:
            return "–"
        target = self.reference.points[0].reward + share * self.reference.gain
        mine, other = self.curve.reaches(target), self.reference.reaches(target)
        if mine is None or self.reference.gain <= 0:
            return "–"
        when = f"{mine.updates:.1f} updates, {self.curve.time(mine.seconds)}"
        if self.curve is self.reference or other is None or not mine.seconds or not other.seconds:
            return when
        ratio = other.seconds / mine.seconds
        if self.curve.gpus and self.reference.gpus:
            ratio *= self.reference.gpus / self.curve.gpus
        return f"{when} ({ratio:.2f} ×)"


def header() -> list[str]:
    return ["run", "objective", "rollout", "held-out reward", *(f"{share:.0%} of the first's gain" for share in SHARES)]


def compare(folders: Sequence[Path]) -> list[Compared]:
    """Raises UserError: one is not the folder of a run that has begun, or has not been evaluated."""
    runs = [read_run(folder) for folder in folders]
    curves = [Curve.of(run) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.points:
            raise UserError(f"{run.folder} cannot be compared: its policy has not been evaluated yet.")
    names = [run.config.run.name for run in runs]
    told = [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]
    return [
        Compared(run, name, curve, curves[0], comparable=not _measured_differently(run, runs[0]))
        for run, name, curve in zip(runs, told, curves, strict=True)
    ]


def notes(compared: Sequence[Compared]) -> list[str]:
    """A sentence for each run whose held-out rewards do not measure what the first run's do."""
    first, *others = compared
    differing = {other.name: _measured_differently(other.run, first.run) for other in others}
    return [
        f"the held-out rewards of {name} and {first.name} cannot be compared: the runs differ in {listed(keys)}"
        for name, keys in differing.items()
        if keys
    ]


def _measured_differently(run: RunData, other: RunData) -> list[str]:
    """What two runs were evaluated with and differs."""
    mine, others = (
        {
            "model.path": each.config.model.path,
            "the shapes of pictures": _shapes(each.config),
            "rewards": each.config.rewards,
            "the held-out prompts": {p for e in each.evaluations if e.policy == "base" for p in e.rewards},
            "evaluation.samples": each.config.evaluation.samples,
            "evaluation.steps": each.config.evaluation.steps,
            "the guidance of evaluations": (each.config.evaluated_model.guidance, each.config.evaluated_model.cfg),
        }
        for each in (run, other)
    )
    return [key for key in mine if mine[key] != others[key]]


def _shapes(config: Config) -> tuple[object, ...]:
    """What decides the shape of each held-out prompt's pictures: of several shapes one is drawn, by the run's seed."""
    shapes = config.model.shapes
    return shapes if len(shapes) == 1 else (*shapes, config.run.seed)


def table(compared: Sequence[Compared]) -> str:
    return plain_table([header(), *(each.line for each in compared)])
