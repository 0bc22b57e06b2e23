"""What follows if previews rank badly for too long (`fidelity.floor`): a warning, or the end of the run.

Decided by the run's records alone, so that a resumed run decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from solrl_ray.config.problems import counted
from solrl_ray.config.schema import Config, Fidelity
from solrl_ray.metrics.records import IterationMetrics


def is_low(fidelity: Fidelity, record: IterationMetrics) -> bool:
    """Whether an iteration's measure is below the floor. False without a floor, or if it was not measured."""
    value: float | None = getattr(record, fidelity.measure)
    return fidelity.floor is not None and value is not None and value < fidelity.floor


def low_in_a_row(fidelity: Fidelity, records: Sequence[IterationMetrics]) -> int:
    """How many iterations in a row, up to the newest, are below the floor."""
    enough = [number for number, record in enumerate(records, start=1) if not is_low(fidelity, record)]
    return len(records) - (enough[-1] if enough else 0)


def low_fidelity(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about these iterations, if `fidelity.patience` of them in a row were low; else empty."""
    fidelity = config.fidelity
    low = [len([*row]) for is_below, row in groupby(is_low(fidelity, record) for record in records) if is_below]
    if max(low, default=0) < fidelity.patience:
        return ""
    return (
        f"Low rank fidelity: {fidelity.measure.capitalize()} was below fidelity.floor, {fidelity.floor:g}, in "
        f"{sum(low)} of {counted(len(records), 'iteration')}."
    )


def news(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about the newest iteration, if with it `fidelity.patience` of them are low; else empty.

    It comes once each time the measure falls.
    """
    fidelity = config.fidelity
    return _describe(config, records) if low_in_a_row(fidelity, records) == fidelity.patience else ""


def stop(config: Config, records: Sequence[IterationMetrics]) -> str:
    """Why the run must end after these iterations, and how to go on; empty if it need not."""
    fidelity = config.fidelity
    if fidelity.on_low != "stop" or low_in_a_row(fidelity, records) < fidelity.patience:
        return ""
    return (
        f"fidelity.on_low is stop: {_describe(config, records)}. Change them in another run (--from this one), or go "
        "on with --resume and fidelity.on_low=warn"
    )


def _describe(config: Config, records: Sequence[IterationMetrics]) -> str:
    fidelity, newest = config.fidelity, records[-1]
    name, value = fidelity.measure.capitalize(), getattr(newest, fidelity.measure)
    low = counted(low_in_a_row(fidelity, records), "iteration")
    return (
        f"previews rank badly: {name} is {value:.3f} in iteration {newest.iteration + 1}, and has been below "
        f"fidelity.floor, {fidelity.floor:g}, for {low}. Raise rollout.explore.steps or rollout.explore.precision, or "
        "prune later or less (rollout.preview.prune)"
    )
