"""Runs side by side: when each of them had a share of the first one's gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solrl_ray.cli import main
from solrl_ray.errors import UserError
from solrl_ray.report.compare_runs import Compared, compare, notes
from solrl_ray.report.curve import Curve, Point
from solrl_ray.report.data import read_run
from tests.support.made_runs import BASE, FINAL, evaluation, write_run

CURVE = Curve((Point(0, 0.0, 0.2, 0.0), Point(4, 40.0, 0.6, 0.0), Point(8, 100.0, 0.5, 0.0)), gpus=2.0)


def test_a_reward_is_reached_between_two_evaluations_or_never() -> None:
    found = CURVE.reaches(0.3)
    assert found is not None
    assert (found.updates, found.seconds) == pytest.approx((1.0, 10.0))
    assert CURVE.reaches(0.1) == CURVE.points[0]
    assert CURVE.reaches(0.61) is None
    assert Curve((), gpus=0.0).reaches(0.1) is None
    assert CURVE.gain == pytest.approx(0.3)
    assert CURVE.time(3600.0) == "2 GPU-hours"


def test_seconds_are_those_of_the_iterations_before_an_evaluation(tmp_path: Path) -> None:
    half = {prompt: tuple((a + b) / 2 for a, b in zip(BASE[prompt], FINAL[prompt], strict=True)) for prompt in BASE}
    evaluated = [evaluation(0, "base", BASE), evaluation(1, "ema", half), evaluation(3, "ema", FINAL)]
    curve = Curve.of(read_run(write_run(tmp_path / "run", evaluated=evaluated)))
    assert [(point.updates, point.seconds) for point in curve.points] == [(0, 0.0), (1, 10.0), (3, 30.0)]
    assert curve.gpus == 0


def test_two_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = write_run(tmp_path / "slow"), tmp_path / "fast"
    write_run(fast, done=2, of=2)
    assert main(["report", str(slow), str(fast)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "run"
    assert "1.5 updates, 15.0 s  " in first
    assert "1.0 updates, 10.0 s (1.50 ×)" in second
    assert first.startswith(str(slow))  # both runs have one name


def test_runs_that_were_evaluated_with_other_prompts_or_rewards_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, same = write_run(tmp_path / "one"), write_run(tmp_path / "same", done=2, of=2)
    fewer = {"aa": BASE["aa"], "bb": BASE["bb"]}
    evaluated = [evaluation(0, "base", fewer), evaluation(3, "ema", fewer)]
    other = write_run(tmp_path / "other", evaluated=evaluated, rewards=[{"kind": "clipscore", "weight": 2.0}])
    assert notes(compare([one, same])) == []
    assert main(["report", str(one), str(same), str(other)]) == 0
    said = f"the held-out rewards of {other} and {one} cannot be compared: the runs differ in rewards and the held-out"
    printed = capsys.readouterr().out
    assert f"note: {said} prompts\n" in printed
    [row] = [line for line in printed.splitlines() if line.startswith(str(other))]
    assert row.split()[-4:] == ["–"] * 4  # its level of another reward is no share of the first run's gain


@pytest.mark.parametrize("guidance", [{"guidance": 3.5}, {"cfg": {"scale": 4.5}}])
def test_runs_that_were_evaluated_with_other_guidance_are_told(guidance: dict[str, Any], tmp_path: Path) -> None:
    plain, other = write_run(tmp_path / "plain"), write_run(tmp_path / "other", evaluation=guidance)
    compared = compare([plain, other])
    assert not compared[1].comparable
    assert "guidance" in notes(compared)[0]
    trained = write_run(tmp_path / "trained", model=guidance, evaluation={"guidance": 1.0, "cfg": {}})
    assert notes(compare([plain, trained])) == []


def test_runs_whose_evaluated_pictures_have_other_shapes_are_told(tmp_path: Path) -> None:
    several: Any = {"resolution": [[32, 32], [32, 48]]}
    plain, wide = write_run(tmp_path / "plain"), write_run(tmp_path / "wide", model={"resolution": [32, 48]})
    drawn = write_run(tmp_path / "drawn", model=several)
    again = write_run(tmp_path / "again", model=several, run={"seed": 8})
    for one, other in ((plain, wide), (plain, drawn), (drawn, again)):
        assert "image sizes" in notes(compare([one, other]))[0]
    pair = write_run(tmp_path / "pair", model={"resolution": [32, 32]}, run={"seed": 8})
    assert notes(compare([write_run(tmp_path / "side", model={"resolution": 32}), pair])) == []


def test_of_runs_on_gpus_gpu_hours_are_compared() -> None:
    """Two GPU-hours instead of eight, though it takes twice the time."""
    many = Curve((Point(0, 0.0, 0.2, 0.0), Point(4, 3600.0, 0.6, 0.0)), gpus=8.0)
    one = Curve((Point(0, 0.0, 0.2, 0.0), Point(4, 7200.0, 0.6, 0.0)), gpus=1.0)
    run: Any = None  # its name and settings are not looked at
    assert Compared(run, "one", one, many)._reached(1.0) == "4.0 updates, 2 GPU-hours (4.00 ×)"
    assert Compared(run, "short", Curve(one.points[:1], gpus=1.0), many)._reached(1.0) == "–"


def test_a_run_without_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", evaluated=[], finished=False)]
    with pytest.raises(UserError, match=str(runs[1])):
        compare(runs)
