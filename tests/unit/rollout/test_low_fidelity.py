"""Previews that rank badly for too long: when it is told, and when the run ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import IterationMetrics
from solrl_ray.rollout.low_fidelity import news, stop
from tests.support import made_runs
from tests.support.made_configs import changed

LOW, OK = 0.4, 0.5
"""Below the floor, and on it."""


def config(**fidelity: object) -> Config:
    return changed(made_runs.config(), fidelity={"floor": 0.5, "patience": 2} | fidelity)


def measured(spearman: Sequence[float | None]) -> list[IterationMetrics]:
    return [replace(made_runs.iteration(number), spearman=value) for number, value in enumerate(spearman)]


def told(spearman: Sequence[float | None], given: Config) -> list[bool]:
    """After which iterations there is a warning."""
    records = measured(spearman)
    return [bool(news(given, records[: number + 1])) for number in range(len(records))]


@pytest.mark.parametrize(
    ("spearman", "warned"),
    [
        ([LOW, LOW, LOW, LOW], [1]),
        ([LOW, OK, LOW, OK], []),
        ([LOW, LOW, OK, LOW, LOW, LOW], [1, 4]),
        ([LOW, None, LOW, LOW], [3]),
    ],
    ids=["once", "never for long", "once each time it falls", "what was not measured is not low"],
)
def test_a_warning_comes_after_patience_iterations_in_a_row_and_once_each_time(
    spearman: list[float | None], warned: list[int]
) -> None:
    assert told(spearman, config()) == [number in warned for number in range(len(spearman))]


def test_without_a_floor_nothing_is_low() -> None:
    assert told([-1.0] * 5, config(floor=None)) == [False] * 5


def test_the_warning_has_measure_and_floor_and_names_the_keys_to_change() -> None:
    said = news(config(), measured([LOW, 0.3]))
    assert "Spearman is 0.300 in iteration 2" in said
    assert "below fidelity.floor, 0.5, for 2 iterations" in said
    for key in ("rollout.explore.steps", "rollout.explore.precision", "rollout.preview.prune"):
        assert key in said


def test_the_measure_is_the_configured_one() -> None:
    records = [replace(record, kendall=0.9) for record in measured([LOW, LOW])]
    assert news(config(measure="kendall"), records) == ""
    assert "Kendall is 0.100" in news(config(measure="kendall"), [replace(record, kendall=0.1) for record in records])


def test_a_run_that_is_to_stop_does_so_then_and_again_whenever_it_is_resumed_there() -> None:
    stops = config(on_low="stop")
    records = measured([OK, LOW, LOW, LOW, OK])
    ends = [bool(stop(stops, records[:number])) for number in range(len(records) + 1)]
    assert ends == [False, False, False, True, True, False]  # a fourth record is of a run that went on with a warning
    assert stop(stops, records[:3]) == stop(stops, list(records[:3]))
    said = stop(stops, records[:3])
    assert said.startswith("fidelity.on_low is stop: ")
    assert news(stops, records[:3]) in said
    assert "--resume and fidelity.on_low=warn" in said
    assert not any(stop(config(), records[:number]) for number in range(len(records) + 1))
