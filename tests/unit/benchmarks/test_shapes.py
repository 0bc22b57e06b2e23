"""The map of shapes of an iteration: every shape can be run, what is searched next, and what is made of the runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import campaign
import pytest
import shape_results
import shapes
from shape_results import REFERENCE, SEEDS, Shape
from shapes import Key

from solrl_ray.config.strategies import is_one_stage, pool_sampling
from solrl_ray.objectives.schedules import learning_rate
from solrl_ray.planning.update import trained_timesteps


def run(*reward: float, ended: str = "limit") -> dict[str, Any]:
    return {"iterations": [10 * n for n in range(len(reward))], "reward": list(reward), "ended": ended}


@pytest.mark.parametrize("option", shape_results.OPTIONS)
def test_a_shape_with_an_option_is_a_valid_run_beside_the_one_without(option: str) -> None:
    given = argparse.Namespace(root=Path("runs"), gpu=True, tiny=False, limit=7500.0)
    plain, changed = (Key(f"4x1_8of48{end}", 5e-4, 43).job(given).config for end in ("", f"+{option}"))
    assert changed.rollout == plain.rollout
    assert (changed.objective, changed.learner) != (plain.objective, plain.learner)
    trained = re.fullmatch(r"kl_0_(\d)of\d.*", option)  # the first of both numbers
    passes = 2 if option == "two_early" else int(trained[1]) if trained else 4
    assert trained_timesteps(changed) == passes


@pytest.mark.parametrize("shape", ["1x1_4of4", "4x1_8of48", "2x3_24of24"])
def test_a_decay_ends_with_the_run_after_its_charged_seconds(shape: str) -> None:
    given = argparse.Namespace(root=Path("runs"), gpu=True, tiny=False, limit=1000.0)
    for option, seconds in (("decay_2000", 2000.0), ("decay_4000", 4000.0)):
        key = Key(f"{shape}+{option}", 1e-3, 42)
        config, charged = key.job(given).config, shape_results.SHAPES[shape].charged("flux1_dev")
        assert seconds <= config.run.iterations * charged < seconds + charged
        steps = config.run.iterations * config.learner.optimizer_steps
        rates = [learning_rate(config.learner, step) for step in (1, steps // 2 + 1, steps)]
        assert rates == pytest.approx([1e-3, 5e-4, 0], abs=1e-3 / (steps - 1))
        assert shape_results.SHAPES[key.shape].charged("flux1_dev") == charged


def test_an_option_is_charged_for_the_passes_that_it_makes() -> None:
    plain, no_kl, twice, two = (
        Shape(4, 8, 48, 1, option).charged("flux1_dev") for option in ("", "kl_0", "epochs_2", "two_early")
    )
    assert two < no_kl < plain < twice < 2 * plain


@pytest.mark.parametrize("shape", [Shape(1, 4, 0, 1), Shape(2, 8, 48, 3), Shape(4, 24, 48, 1), Shape(12, 24, 96, 6)])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_shape_is_a_valid_run_of_equal_optimiser_steps(shape: Shape, gpu: bool) -> None:
    given = argparse.Namespace(root=Path("runs"), gpu=gpu, tiny=False, limit=7500.0)
    config = Key(shape.name, 5e-4, 43).job(given).config
    assert (config.run.seed, config.learner.optimizer.lr) == (43, 5e-4)
    assert config.rollout.prompts == config.learner.updates * shape.prompts
    assert shape.prompts * shape.chosen % config.learner.micro_batch == 0
    assert (config.rollout.keep, config.rollout.pool) == (shape.chosen, shape.pool or shape.chosen)
    assert is_one_stage(config) == (not shape.pool)
    pool = pool_sampling(config)
    assert bool(pool.pruning) == bool(shape.pool)
    assert pool.pruning is None or shape.chosen <= pool.pruning.keep < shape.pool


def test_more_samples_and_steps_are_charged_more() -> None:
    least, more, most = (Shape(*each).charged("flux1_dev") for each in ((2, 8, 0, 1), (2, 8, 48, 1), (2, 8, 48, 3)))
    assert least < more < most < 3.5 * more


def test_time_to_a_share_of_the_way_is_read_between_evaluations() -> None:
    half, never = run(0.45, 0.65, 0.95), run(0.45, 0.5)
    assert shape_results.iterations_to(half, 0.9) == pytest.approx(10 + 10 * 0.25 / 0.3)
    assert shape_results.iterations_to(never, 0.75) == math.inf


def test_a_run_is_behind_when_the_soonest_of_its_side_was_there_in_half_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 100.0)
    first = f"{shape_results.RATES[0]:g}"
    pace = shape_results.Pace.of({"4x1_8of48": {first: {"42": run(0.45, 0.825)}}})  # 75 % after ten iterations
    assert not pace.look("4x1_8of96", run(0.45, 0.5, 0.6))
    assert pace.look("4x1_8of96", run(0.45, 0.5, 0.6, 0.7))
    assert not pace.look("4x1_8of96", run(0.45, 0.5, 0.6, 0.825))
    assert not pace.look("4x1_8of8", run(0.45, 0.5, 0.6, 0.7))  # nobody of its side was there yet


def test_the_next_stage_follows_from_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 100.0)
    fast, slow, one = "4x1_8of48", "4x1_8of96", "4x1_8of8"
    names = (fast, slow, one, REFERENCE)
    first, second, third, _ = (f"{rate:g}" for rate in shape_results.RATES)
    assert shapes.wanted("screen", {}, names) == [Key(name, shape_results.RATES[0], SEEDS[0]) for name in names]
    runs: shape_results.Runs = {
        fast: {first: {"42": run(0.45, 0.95)}},
        slow: {first: {"42": run(0.45, 0.5, 0.55, 0.6, 0.95)}},  # four times as long
        one: {first: {"42": run(0.45, 0.6, 0.95)}},
        REFERENCE: {first: {"42": run(0.45, 0.5)}},
    }
    rates = {(key.shape, key.rate) for key in shapes.wanted("rates", runs, names)}
    assert rates == {(name, rate) for name in (fast, one, REFERENCE) for rate in shape_results.RATES[1:]}
    runs[fast][second] = {"42": run(0.45, 0.5, 0.95)}
    runs[one][third] = {"42": run(0.45, 0.95)}
    seeds = shapes.wanted("seeds", runs, names)
    assert {key.seed for key in seeds} == set(SEEDS)
    best = {(fast, first), (slow, first), (one, third), (REFERENCE, first)}
    assert {(key.shape, f"{key.rate:g}") for key in seeds} == best
    runs[f"{fast}+kl_0"] = {second: {"42": run(0.45, 0.96)}}  # an option is no shape of the map
    rates = {(key.shape, key.rate) for key in shapes.wanted("rates", runs, names)}
    assert rates == {(name, rate) for name in (fast, one, REFERENCE) for rate in shape_results.RATES[1:]}
    assert shape_results.winner(runs, True) == f"{fast}+kl_0"


def test_a_run_that_was_cut_short_counts_once_it_is_there_and_until_then_only_the_first_seed_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 100.0)
    there, stopped = run(0.45, 0.9), run(0.45, 0.6, ended="")
    of_seed = {"42": run(0.45, 0.45, 0.9), "43": run(0.45, 0.9, ended="")}
    for more, expected in (({}, [2000, 1000]), ({"44": stopped, "45": there}, [2000])):
        runs = {"4x1_8of8": {"0.001": of_seed | more}}
        assert shape_results.times(runs, "4x1_8of8", "0.001").seconds == pytest.approx(expected)
    assert shape_results.times({"4x1_8of8": {"0.001": {"42": stopped}}}, "4x1_8of8", "0.001").seconds == ()


def test_a_run_that_was_not_there_counts_with_the_time_that_it_had_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 200.0)
    late = [0.45] * 4 + [0.9]  # there after 40 iterations, of which the limit of 6,000 s has 30
    runs = {"4x1_8of8": {"0.001": {"42": run(0.45, 0.9), "43": run(0.45, 0.5, 0.6), "44": run(*late)}}}
    took = shape_results.times(runs, "4x1_8of8", "0.001")
    assert took.seconds == pytest.approx((2000, 4000, 6200))  # the last iteration begins within the limit
    assert (took.there, took.complete) == (1, False)
    mine = shape_results.Times((1000.0, 1000.0), 2)
    assert shape_results.ratio(mine, took)[0] == pytest.approx((2000 + 4000 + 6200) / 3 / 1000)
    assert shape_results.ratio(took, mine) is None


def test_a_run_stays_known_until_one_that_says_more() -> None:
    results: dict[str, Any] = {"runs": {}}
    key = Key("4x1_8of8", 1e-3, 42)
    of_seed = results["runs"].setdefault("4x1_8of8", {}).setdefault("0.001", {})
    shorter, longer, ended = run(0.45, 0.5, ended=""), run(0.45, 0.5, 0.6, ended=""), run(0.45, 0.95, ended="reached")
    for one, expected in ((longer, longer), (shorter, longer), (ended, ended), (longer, ended)):
        key.keep(results, one)
        assert of_seed["42"] is expected


def test_a_rate_is_chosen_by_the_mean_of_the_most_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 100.0)
    slow, steady = {"42": run(0.45, 0.9), "43": run(0.45, 0.45, 0.45, 0.9)}, {"42": run(0.45, 0.45, 0.9)}
    runs = {"4x1_8of8": {"0.001": slow, "0.0005": steady, "0.002": {"42": run(0.45, 0.95)}}}
    assert shape_results.best_rate(runs, "4x1_8of8")[1] == "0.001"
    steady |= {"42": run(0.45, 0.8, 0.95), "43": run(0.45, 0.8, 0.9)}
    assert shape_results.best_rate(runs, "4x1_8of8")[1] == "0.0005"


@pytest.mark.parametrize("stage", shapes.STAGES)
def test_named_shapes_take_the_place_of_a_stages_own(stage: str) -> None:
    keys = shapes.wanted(stage, {}, shapes.MAP, ["4x1_8of96", "1x1_4of4"])
    assert {key.shape.partition("+")[0] for key in keys} == {"4x1_8of96", "1x1_4of4"}
    seeds, rates = {key.seed for key in keys}, {key.rate for key in keys}
    assert seeds == (set(SEEDS[:1]) if stage in ("screen", "rates") else set(SEEDS))
    assert rates == (set(shape_results.RATES[1:]) if stage == "rates" else {shape_results.RATES[0]})


@pytest.mark.parametrize(("ends", "expected"), [(9, ["screen", "rates"]), (1, ["screen", "rates"]), (0, ["screen"])])
def test_a_stage_follows_another_whose_runs_have_ended(
    ends: int, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ends`: of how many stages all runs end."""
    trained: list[list[Key]] = []

    def train(keys: list[Key], results: dict[str, Any], arguments: argparse.Namespace, left: float, pace: Any) -> None:
        assert 0 < left <= 100
        trained.append(keys)
        for key in keys:
            key.keep(results, run(0.45, 0.5, ended="limit" if len(trained) <= ends else ""))

    monkeypatch.setattr(shapes, "train", train)
    results: dict[str, Any] = {"runs": {}}
    given = argparse.Namespace(seconds=100.0, shapes=["1x1_4of4"], results=tmp_path / "shapes.json")
    shapes.train_stages(["screen", "rates"], shapes.MAP, results, given)
    assert trained == [shapes.wanted(stage, {}, (), ["1x1_4of4"]) for stage in expected]
    shapes.train_stages(["screen", "rates"], shapes.MAP, results, given)
    assert len(trained) == len(expected) + (ends < 2)


def test_sides_are_compared_by_means_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "charged", lambda self, place: 50.0 if self.pool else 100.0)
    two = {"42": run(0.4, 0.9), "43": run(0.4, 0.4, 0.9)}
    one, direct = {"42": run(0.4, 0.9), "43": run(0.4, 0.9)}, {"42": run(0.4, 0.4, 0.9), "43": run(0.4, 0.5)}
    runs = {name: {"0.001": of} for name, of in (("4x1_8of48", two), ("4x1_8of8", one), (REFERENCE, direct))}
    runs["4x1_8of48+kl_0"] = {"0.001": {"42": run(0.4, 0.4, 0.9), "43": run(0.4, 0.4, 0.9)}}
    given = {"runs": runs}
    before = json.dumps(given)
    found = shape_results.summary(given)
    assert json.dumps(given) == before
    assert found["best"] == {"two_stage": "4x1_8of48", "one_stage": "4x1_8of8"}
    assert found["seconds_to_90"] == pytest.approx(50 * (10 + 20) / 2)
    middle, low, high = found["two_stage_over_one_stage"]
    assert (middle, low, high) == pytest.approx((1000 / 750, 1.0, 2.0))
    assert found["over_24_of_24"][0] == pytest.approx((2000 + 1000) / 2 / 750)  # one seed had ten iterations in all


def test_a_run_that_came_far_enough_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_training", lambda job: [sys.executable, "-c", "import time; time.sleep(600)"])
    job = campaign.Job((shapes.CONFIGS / "demo.yaml",), (f"run.root='{tmp_path}'",))
    asked = []
    campaign.train_all([job], at_once=1, seconds=500.0, enough=lambda each: asked.append(each) or True)
    assert asked == [job]


def test_runs_are_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = "import os, sys; open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [
        campaign.Job((shapes.CONFIGS / "demo.yaml",), (f"run={{root: '{tmp_path}', name: run-{n}}}",)) for n in range(4)
    ]
    seen = [tmp_path / f"gpu-{n}" for n in range(4)]
    monkeypatch.setattr(campaign, "_training", lambda job: [sys.executable, "-c", note, str(seen[jobs.index(job)])])
    with shapes.mps(2, False) as places:
        campaign.train_all(jobs, at_once=4, seconds=60.0, places=places)
    assert [path.read_text() for path in seen] == ["0", "1", "0", "1"]
