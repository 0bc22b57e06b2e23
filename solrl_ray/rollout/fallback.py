"""The fallback ladder: previews that rank badly for too long get less pruning, more steps, then a higher tier.

::

    level 0, as configured ──`patience` iterations below `floor`──► level 1 ──…──► last level        never back

The level of an iteration is a function of earlier iterations' measurements alone. So a resumed run arrives at the same
level, and the fleet has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import at_fallback_level, is_one_stage, previews
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.records import Pruning


@dataclass(frozen=True, slots=True)
class Standing:
    """The state before an iteration."""

    level: int
    low: int
    """How many of the last known iterations, in a row and on this level, were below the floor."""


def in_a_row(iterations: int) -> str:
    """``1 iteration``, ``3 iterations in a row``."""
    return "1 iteration" if iterations == 1 else f"{iterations} iterations in a row"


class FallbackLadder:
    def __init__(self, config: Config, *, staleness: int = 0) -> None:
        """`staleness`: how many of the iterations just before one are not measured yet when it is explored."""
        self._config = config
        self._staleness = staleness

    def fallback_level(self, iteration: int, records: Sequence[IterationMetrics]) -> int:
        """The level that explores `iteration`, from the records of earlier ones; others are ignored."""
        return self.standing(iteration, records).level

    def standing(self, iteration: int, records: Sequence[IterationMetrics]) -> Standing:
        """As `fallback_level`, with the number of iterations in a row below the floor there."""
        fidelity = self._config.fidelity
        level = low = 0
        for record in sorted(records, key=lambda record: record.iteration):
            known = record.iteration < iteration - self._staleness
            if fidelity.floor is None or not known or record.fallback_level != level:
                continue  # an iteration explored before the last level took effect says nothing about that level
            value = self.measured(record)
            low = low + 1 if value is not None and value < fidelity.floor else 0
            if low == fidelity.patience and level < len(fidelity.fallback):
                level, low = level + 1, 0
        return Standing(level, low)

    def measured(self, record: IterationMetrics) -> float | None:
        """The figure that is compared with the floor: of whole pools if they are audited, else of regenerated seeds."""
        fidelity = self._config.fidelity
        if fidelity.audit_prompts:
            return record.audit.get(fidelity.measure)
        return record.spearman if fidelity.measure == "spearman" else record.kendall

    def steps(self, level: int) -> int | None:
        """Solver steps of a preview on `level`; None on level 0, whose units do not state them."""
        return previews(self._config)[level].steps if level else None

    def pruning(self, level: int) -> Pruning | None:
        """Pruning of each unit of previews on `level`; None if all are finished, or there are none."""
        return None if is_one_stage(self._config) else previews(self._config)[level].pruning

    def config(self, level: int) -> Config:
        """The configuration of explorers on `level`."""
        return at_fallback_level(self._config, level)

    def news(self, iteration: int, records: Sequence[IterationMetrics]) -> str:
        """A sentence for the user if `iteration` is the first one on its level, or no level is left; else empty."""
        fidelity, standing = self._config.fidelity, self.standing(iteration, records)
        before = self.standing(iteration - 1, records)
        name, times = fidelity.measure.capitalize(), in_a_row(fidelity.patience)
        if standing.level > before.level:
            first, preview = (previews(self._config)[level] for level in (0, standing.level))
            prune, how = preview.prune, ""
            if first.prune:
                how = f", pruned after {prune.after} steps to {prune.keep} seeds" if prune else ", none of them pruned"
            return (
                f"rank fidelity: {name} was below {fidelity.floor:g} in {times}; from iteration {iteration + 1} on "
                f"previews take {preview.steps} steps in {preview.tier}{how} "
                f"(fallback level {standing.level} of {len(fidelity.fallback)})"
            )
        if standing != before and standing.low == fidelity.patience:
            return (
                f"rank fidelity: {name} was below {fidelity.floor:g} in {times}, on the last fallback level: "
                "fidelity.fallback has no further one"
            )
        return ""
