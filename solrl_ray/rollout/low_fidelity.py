"""Warns or ends the run if previews rank badly for too long (`fidelity.floor`).

The decision depends only on the run's records, so a resumed run makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from solrl_ray.config.problems import counted
from solrl_ray.config.schema import Config, Fidelity
from solrl_ray.metrics.records import IterationMetrics


def is_low(fidelity: Fidelity, record: IterationMetrics) -> bool:
    """Whether an iteration's rank fidelity is below the floor. False without a floor or without a measurement."""
    value: float | None = getattr(record, fidelity.measure)
    return fidelity.floor is not None and value is not None and value < fidelity.floor


def low_in_a_row(fidelity: Fidelity, records: Sequence[IterationMetrics]) -> int:
    """Number of consecutive iterations below the floor, counted back from the newest."""
    enough = [number for number, record in enumerate(records, start=1) if not is_low(fidelity, record)]
    return len(records) - (enough[-1] if enough else 0)


def low_fidelity(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about these iterations, if `fidelity.patience` consecutive ones were low; else empty."""
    fidelity = config.fidelity
    low = [len([*row]) for is_below, row in groupby(is_low(fidelity, record) for record in records) if is_below]
    if max(low, default=0) < fidelity.patience:
        return ""
    return (
        f"Low rank fidelity: {fidelity.measure.capitalize()} was below fidelity.floor, {fidelity.floor:g}, in "
        f"{sum(low)} of {counted(len(records), 'iteration')}."
    )


def news(config: Config, records: Sequence[IterationMetrics]) -> str:
    """The warning about the newest iteration, if it is number `fidelity.patience` of a low stretch; else empty.

    So each stretch of low iterations gives one warning.
    """
    fidelity = config.fidelity
    return _describe(config, records) if low_in_a_row(fidelity, records) == fidelity.patience else ""


def stop(config: Config, records: Sequence[IterationMetrics]) -> str:
    """Why the run must end after these iterations, and how to continue; empty if it need not end."""
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
