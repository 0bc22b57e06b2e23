"""``solrl report`` for several runs: when each reached a held-out reward, and how much faster in GPU-hours."""

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
    """A run, compared with the first run."""

    run: RunData
    name: str
    """Name of the run; its folder if several runs have the same name."""
    curve: Curve
    reference: Curve
    """Curve of the first run."""
    comparable: bool = True
    """True if its held-out rewards were measured like those of the first run."""

    @property
    def line(self) -> list[str]:
        """Cells of its row, in the columns of `header`."""
        points, rollout = self.curve.points, self.run.config.rollout
        chosen = f"{rollout.strategy}, {rollout.keep} of {rollout.pool}"
        reward = f"{digits(points[0].reward)} → {digits(points[-1].reward)} after {points[-1].updates:g}"
        return [self.name, self.run.config.objective.kind, chosen, reward, *map(self._reached, SHARES)]

    def _reached(self, share: float) -> str:
        """When the run reached this share of the first run's gain.

        Updates and time or GPU-hours, followed by the speed-up over the first run (in GPU-hours if both have GPUs). –
        if it was not reached.
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
    """Names of the columns of `table`."""
    return [
        "run",
        "objective",
        "rollout",
        "held-out reward",
        *(f"{share:.0%} of the first run's gain" for share in SHARES),
    ]


def compare(folders: Sequence[Path]) -> list[Compared]:
    """Compare runs with the first one. Raises UserError if a folder has no run that has begun and been evaluated."""
    runs = [read_run(folder) for folder in folders]
    curves = [Curve.of(run) for run in runs]
    for run, curve in zip(runs, curves, strict=True):
        if not curve.points:
            raise UserError(
                f"{run.folder} cannot be compared: it has no evaluation of its policy yet. Wait for the first one."
            )
    names = [run.config.run.name for run in runs]
    unique = [name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)]
    return [
        Compared(run, name, curve, curves[0], comparable=not _measured_differently(run, runs[0]))
        for run, name, curve in zip(runs, unique, curves, strict=True)
    ]


def notes(compared: Sequence[Compared]) -> list[str]:
    """A sentence for each run whose held-out rewards cannot be compared with those of the first run."""
    first, *others = compared
    differing = {other.name: _measured_differently(other.run, first.run) for other in others}
    return [
        f"the held-out rewards of {name} and {first.name} cannot be compared: the runs differ in {listed(keys)}"
        for name, keys in differing.items()
        if keys
    ]


def _measured_differently(run: RunData, other: RunData) -> list[str]:
    """Names of the evaluation settings in which two runs differ."""
    mine, others = (
        {
            "model.path": data.config.model.path,
            "the image sizes": _shapes(data.config),
            "rewards": data.config.rewards,
            "the held-out prompts": {p for e in data.evaluations if e.policy == "base" for p in e.rewards},
            "evaluation.samples": data.config.evaluation.samples,
            "evaluation.steps": data.config.evaluation.steps,
            "the guidance of evaluations": (data.config.evaluated_model.guidance, data.config.evaluated_model.cfg),
        }
        for data in (run, other)
    )
    return [key for key in mine if mine[key] != others[key]]


def _shapes(config: Config) -> tuple[object, ...]:
    """The settings that decide the image size of each held-out prompt. Of several sizes, the run seed draws one."""
    shapes = config.model.shapes
    return shapes if len(shapes) == 1 else (*shapes, config.run.seed)


def table(compared: Sequence[Compared]) -> str:
    """The comparison as plain text, one row per run."""
    return plain_table([header(), *(run.line for run in compared)])
