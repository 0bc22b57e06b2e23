"""Seconds of an iteration, against schedules worked out by hand and against what was simulated and measured."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import many_gpus
import pytest

from solrl_ray.config import compiled_learner, named
from solrl_ray.config.loading import Sources, load
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.models.shapes import shipped
from solrl_ray.planning import fitting
from solrl_ray.planning.arithmetic import describe
from solrl_ray.planning.forecast import Forecast, forecast
from solrl_ray.planning.iteration import Iteration, Orchestration, Stages, iteration
from solrl_ray.planning.outline import facts_of
from solrl_ray.planning.prices import Cluster, orchestration, price_list

ROOT = Path(__file__).parents[3]
ONE = Stages(explore=1.0, regenerate=1.0, update=1.0)
CARDS = "fleet.placement=colocated"
AHEAD = "rollout.max_staleness=1"
FREE = Orchestration(conditions="none")


def made(
    explorers: int = 1,
    regenerators: int = 0,
    *settings: str,
    prompts: int = 8,
    units: int = 2,
    stages: Stages = ONE,
    costs: Orchestration = FREE,
) -> Iteration:
    """8 prompts × 2 explore units, stages of 1 s."""
    given = (
        f"rollout={{prompts: {prompts}, pool: {4 * units}, keep: 4, explore: {{micro_batch: 4}}}}",
        f"fleet={{explorers: {{count: {explorers}}}, regenerators: {{count: {regenerators or explorers}}}}}",
        f"learner.world_size={explorers}",
    )
    return iteration(load([ROOT / "configs/demo.yaml"], [*given, *settings]), stages, costs)


@pytest.mark.parametrize(("explorers", "seconds"), [(1, 18.0), (2, 10.0), (4, 6.0), (16, 3.0), (500, 3.0)])
def test_split_an_iteration_is_the_previews_the_last_regeneration_and_the_update(
    explorers: int, seconds: float
) -> None:
    # 16 units on n explorers, then one regeneration (others overlap with exploring), then the update. With 16, all
    # eight regenerations are side by side.
    assert made(explorers).seconds == pytest.approx(seconds)


def test_split_a_learner_begins_with_the_samples_that_are_there() -> None:
    # Seven of eight prompts' passes without gradient are made while the others are sampled, which takes longer.
    stages = Stages(explore=1.0, regenerate=1.0, update=5.0, early=2.0)
    found = made(1, stages=stages)
    assert found.parts["learn"] == pytest.approx(5 - 2 * 7 / 8)
    assert found.busy["learners"] == pytest.approx(5 / found.seconds)
    # Three regenerators: six prompts are there a second before the last two, one after the first round.
    assert made(8, 3, stages=stages).parts["learn"] == pytest.approx(5 - 2 * 6 / 8)
    # Eight: all samples come at once.
    assert made(8, stages=stages).parts["learn"] == 5
    one_stage = "rollout={strategy: scaled, regenerate: {micro_batch: 4}, preview: {prune: null}}"
    assert made(3, 3, one_stage, stages=stages).parts["learn"] == pytest.approx(
        5 - 2 * 7 / 8
    )  # 15 of 16 units, in twos


@pytest.mark.parametrize(("placement", "early"), [("split", True), ("colocated", False)])
def test_learners_with_a_gpu_of_their_own_begin_early(placement: str, early: bool) -> None:
    settings = ["prompts={train: train.txt, heldout: heldout.txt}", f"fleet.placement={placement}"]
    config = compiled_learner.resolve_auto(load(named.resolve([Path("flux1_dev_80gb")]), settings))
    found = planned(config, 8)
    at_work = found.busy["learners"] * found.seconds
    assert at_work == pytest.approx(found.parts["learn"]) if not early else at_work > 1.05 * found.parts["learn"]


@pytest.mark.parametrize(
    ("explorers", "regenerators", "seconds"),
    [
        (16, 1, 1 + 8 + 1),  # first selections after 1 s, then eight regenerations in a row, then the update
        (4, 1, 2 + 8 + 1),  # each explorer has two units in a row, so that the first prompts are there after 2 s
        (8, 3, 2 + 3 + 1),  # three rounds of regeneration
    ],
)
def test_few_regenerators_are_what_everybody_waits_for(explorers: int, regenerators: int, seconds: float) -> None:
    assert made(explorers, regenerators).seconds == pytest.approx(seconds)


def test_in_one_stage_nothing_is_regenerated() -> None:
    one_stage = "rollout={strategy: scaled, regenerate: {micro_batch: 4}, preview: {prune: null}}"
    found = made(2, 2, one_stage)
    assert found.seconds == pytest.approx(16 / 2 + 1)
    assert (found.parts["regenerate after exploring"], found.busy["regenerators"]) == (0, 0)


@pytest.mark.parametrize(
    "together",
    [(CARDS,), ("fleet={explorers: {num_gpus: 0.5}, regenerators: {num_gpus: 0.5}, learners: {num_gpus: 1}}",)],
)
def test_on_one_card_exploring_and_regenerating_add_up(together: tuple[str, ...]) -> None:
    assert made(1, 1, *together).seconds == pytest.approx(16 + 8 + 1)


def test_cards_whose_units_share_no_prompt_share_the_work() -> None:
    assert made(4, 4, CARDS, units=1).seconds == pytest.approx((8 + 8) / 4 + 1)


def test_with_offloading_all_is_explored_before_anything_is_regenerated() -> None:
    found = made(2, 2, CARDS, "fleet.offload=true")
    assert found.parts["explore"] == pytest.approx(16 / 2)
    assert found.parts["regenerate after exploring"] == pytest.approx(8 / 2)


def test_explorers_beside_cards_take_most_of_the_exploring() -> None:
    # 48 units of 1 s: the card that does both alternates, so it explores half as fast as the three others. After
    # 48 / 3.5 s it has half of the time, without its first second, regenerated.
    explored = 48 / 3.5
    left = 48 - (explored - 1) / 2
    found = made(4, 1, CARDS, "learner.world_size=1", prompts=48, units=1)
    assert found.seconds == pytest.approx(explored + -(-left // 1) + 1)


def test_who_gets_work_makes_a_revision_its_own_or_loads_it() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, publication=0.25, load=2.0, merge=0.5)
    assert made(1, 1, stages=stages).parts["publish"] == 2.25
    assert made(1, 1, CARDS, stages=stages).parts["publish"] == 0.75
    beside = made(2, 1, CARDS, "learner.world_size=1", stages=stages)
    assert beside.parts["publish"] == pytest.approx(0.25 + (2.0 + 0.5) / 2)


def test_a_checkpoint_is_written_beside_the_rollout_and_waited_for_if_that_is_shorter() -> None:
    for seconds, waited in ((16.0, 0.0), (20.0, 3.0)):  # the rollout takes 17 s
        stages = Stages(explore=1.0, regenerate=1.0, update=1.0, checkpoint=seconds)
        assert made(stages=stages).parts["checkpoint"] == pytest.approx(waited)


@pytest.mark.parametrize(
    ("explore", "update", "without", "ahead"),
    [
        (3.0, 1.0, 8.0, 6.0),  # explorers set the pace: they never wait
        (1.0, 5.0, 8.0, 7.0),  # regenerators and learners do: nothing is left to explore when they begin
    ],
)
def test_exploring_ahead_hides_the_shorter_of_exploring_and_learning(
    explore: float, update: float, without: float, ahead: float
) -> None:
    stages = Stages(explore=explore, regenerate=1.0, update=update)
    for settings, seconds in (((), without), ((AHEAD,), ahead)):
        assert made(1, 1, *settings, prompts=2, units=1, stages=stages).seconds == pytest.approx(seconds)


def test_with_staleness_regenerators_wait_for_their_revision() -> None:
    stages = Stages(explore=1.0, regenerate=1.0, update=1.0, publication=5.0, load=2.0)
    # Revision, load, two prompts, update.
    assert made(1, 1, AHEAD, prompts=2, units=1, stages=stages).seconds == pytest.approx(5 + 2 + 2 + 1)


def test_the_controllers_messages_delay_the_first_units_and_are_the_pace_if_they_take_longer() -> None:
    costs = Orchestration(conditions="none", message=10, iteration=500, gap=250)
    found = made(16, 16, costs=costs)
    # 16 revisions and 16 units are sent; the gap is counted to the units.
    assert found.parts["orchestration"] == pytest.approx(0.5 + 32 * 0.01)
    assert found.parts["explore"] == pytest.approx(1.25)
    messages = (16 + 8 + 16 + 16) * 0.01
    assert found.busy["controller"] == pytest.approx(messages / 2.5)
    slow = made(16, 16, costs=Orchestration(conditions="none", message=1000))
    assert slow.parts["orchestration"] == pytest.approx(32 + (16 + 8 + 32) - 2)
    assert slow.busy["controller"] == 1


def test_workers_are_busy_for_as_long_as_their_units_take() -> None:
    found = made(3, 2, stages=Stages(explore=0.5, regenerate=2.0, update=1.0))
    assert found.busy["explorers"] == pytest.approx(16 * 0.5 / 3 / found.seconds)
    assert found.busy["regenerators"] == pytest.approx(8 * 2.0 / 2 / found.seconds)
    assert found.busy["learners"] == pytest.approx(1 / found.seconds)


def planned(config: Config, gpus: int, card: str = "h100-80") -> Forecast:
    prices, shapes = price_list(card), shipped(config.model)
    assert shapes is not None
    assert prices.device is not None
    facts = facts_of(config, Sources(), shapes, pool_sampling(config).tier)
    made = describe(fitting.with_activation_memory(config, facts, prices.device), facts)
    return forecast(made, prices, Cluster(gpu=card, gpus_per_node=gpus), orchestration())


STAGED = "fleet.offload=true"


@pytest.mark.parametrize(
    ("settings", "explorers", "prompts", "units", "update", "load", "simulated"),
    [
        ((CARDS,), 1, 48, 4, 647.575, 0.0, 1839.14),
        ((CARDS,), 8, 48, 4, 81.079, 0.0, 239.19),
        ((CARDS,), 64, 48, 4, 13.770, 0.0, 35.27),
        ((CARDS,), 1000, 1000, 4, 16.782, 0.0, 50.10),
        ((CARDS,), 8, 48, 1, 81.079, 0.0, 201.45),
        ((CARDS,), 256, 256, 1, 14.438, 0.0, 35.67),
        ((CARDS,), 1000, 1000, 1, 16.782, 0.0, 38.76),
        ((CARDS, STAGED), 8, 48, 4, 81.079, 0.0, 230.96),
        ((), 8, 48, 4, 162.007, 0.81, 278.24),
        ((), 1000, 1000, 4, 30.269, 2.07, 59.89),
        ((), 64, 48, 1, 20.495, 1.13, 43.93),
    ],
)
def test_a_simulation_of_the_dispatcher_took_as_long(
    settings: tuple[str, ...], explorers: int, prompts: int, units: int, update: float, load: float, simulated: float
) -> None:
    # FLUX.1-dev on H200s, previews unpruned in four units or pruned in one (docs/guides/planning.md).
    stages = Stages(
        explore=4.409 if units == 4 else 12.725,
        regenerate=7.154,
        update=update,
        publication=0.0 if settings else 2.33,
        load=load,
        merge=1.002,
    )
    costs = orchestration()
    found = made(explorers, 0, *settings, prompts=prompts, units=units, stages=stages, costs=costs)
    assert found.seconds == pytest.approx(simulated, rel=0.08)


@pytest.mark.parametrize("model", ["flux1_dev", "sd35_large"])
def test_an_iteration_with_one_process_a_card_is_planned_within_8_percent_of_what_was_measured(model: str) -> None:
    name = {"flux1_dev": "flux", "sd35_large": "sd3"}[model]
    measured = json.loads((ROOT / "benchmarks" / "results" / f"rehearsal_{name}.json").read_text())
    shape = [text for text in measured["conditions"]["set"] if text.startswith(("rollout", "learner"))]
    shape.append("learner.updates=1")  # the default then
    files = named.resolve([Path(f"{model}_80gb")])
    config = compiled_learner.resolve_auto(load(files, ["prompts={train: train.txt, heldout: heldout.txt}", *shape]))
    _, *seconds = (each["total"] for each in measured["parts"]["cold"]["iterations"])
    assert planned(config, 8).seconds == pytest.approx(statistics.fmean(seconds), rel=0.08)


ROWS = json.loads((ROOT / "benchmarks" / "results" / "many_gpus.json").read_text())
WHOLE = [row for row in ROWS if not row["layers"] and row["planned"]]


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: row["variant"])
def test_rollout_and_update_are_planned_within_8_percent_of_what_was_measured(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    card, memory = ("h200", 151.0) if "H200" in row["device"] else ("h100-80", 85.0)
    monkeypatch.setattr(many_gpus, "memory", lambda: memory)
    shape = {name: row[name] for name in ("model", "gpus", "placement", "staleness", "prompts", "layers")}
    arguments = argparse.Namespace(**shape, iterations=3, part=None, work=Path("work"), set=row["set"])
    given = [setting for setting in many_gpus.settings(arguments) if not setting.startswith("model.path")]
    kept = f"learner.activation_memory={row['activation_memory']}"
    config = compiled_learner.resolve_auto(load(many_gpus.files(arguments), [*given, kept]))
    parts = planned(config, row["gpus"], card).parts
    seconds = parts["explore"] + parts["regenerate after exploring"] + parts["learn"]
    # A learner with a GPU of its own begins while samples come in.
    learn = row["seconds"]["update" if row["placement"] == "colocated" else "learn"]
    assert seconds == pytest.approx(row["seconds"]["rollout"] + learn, rel=0.08)
