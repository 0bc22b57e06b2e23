"""Seconds of one prompt by schedule, from a rollout and a learner of round numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from iteration import by_schedule

ROLLOUT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "seconds": {"naive": 30.0, "previews": 12.0, "regeneration": 7.0},
    "pruned": {"2:36:12": {"seconds": 15.0}, "2:48:24": {"seconds": 16.0}},
    "released": {"naive": 40.0, "previews": 38.0, "regeneration": 10.0},
}
HALF, ALL = "compiled, activation memory 0.5", "compiled, activation memory 1"


def results(folder: Path, shipped: str) -> Path:
    sides = {"eager": 200.0, ALL: 100.0, HALF: 125.0}  # milliseconds of a sample and timestep
    learner = {"shipped": shipped, "sides": [{"side": s, "milliseconds": {"sum": ms}} for s, ms in sides.items()]}
    for name, content in (("rollout_flux", ROLLOUT), ("learner_flux", learner)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_each_schedule_has_its_rollout_and_its_learner(tmp_path: Path) -> None:
    found = by_schedule(results(tmp_path, HALF), "flux")
    assert found is not None
    # 24 samples at 4 timesteps: 96 passes of 0.2, 0.125 and 0.1 s.
    assert found["total"] == pytest.approx(
        {
            "released": 40 + 19.2,
            "released two-stage": 38 + 10 + 19.2,
            "fair": 30 + 12,
            "ours, not pruned": 12 + 7 + 12,
            "ours": 15 + 12,  # of the faster pruning
            "fair, all activations kept": 30 + 9.6,
            "ours, all activations kept": 15 + 9.6,
        }
    )


def test_a_learner_that_keeps_all_is_told_once_and_what_is_missing_is_not_told(tmp_path: Path) -> None:
    found = by_schedule(results(tmp_path, ALL), "flux")
    assert found is not None
    assert list(found["seconds"]) == ["released", "released two-stage", "fair", "ours, not pruned", "ours"]
    assert by_schedule(tmp_path, "flux", small_decoder=True) is None
