"""Held-out evaluation without workers: its units, and the name by which a run's actors are found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pytest

from actors.cluster.names import namespace
from actors.dispatch.unit_router import UnitRouter
from actors.evaluation.evaluator import Evaluation
from actors.workers.regenerator import Evaluated
from actors.world import Tasks
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError
from solrl_ray.evaluation.held_out import EVAL_POLICIES, UNIT_POLICY, evaluation_units
from solrl_ray.records import Prompt, SampleShape, WorkUnit
from tests.support import made_runs

CONFIGS = Path(__file__).parents[3] / "configs"
T = TypeVar("T")
PROMPTS = [Prompt(id="aa", text="a red circle"), Prompt(id="bb", text="two green triangles")]
REST: dict[str, Any] = {"images": None, "seconds": 0.1, "started": 0.0}


def test_a_late_answer_of_one_evaluation_is_none_of_the_next() -> None:
    """Real pictures, the base and, after a warm start, the average are scored one after the other at 0 updates."""
    config, policies = made_runs.config(), UNIT_POLICY.values()
    made = [{u.id for u in evaluation_units(config, PROMPTS, updates=0, policy=policy)} for policy in policies]
    assert all(len(units) == 2 for units in made)
    assert all(one.isdisjoint(other) for one, other in combinations(made, 2))
    assert len(set(EVAL_POLICIES)) == len(EVAL_POLICIES)


def test_prompts_of_one_shape_share_a_unit_as_far_as_its_micro_batch_has_room_for_whole_ones() -> None:
    settings = ("evaluation={samples: 2, micro_batch: 5}", "model.resolution=[[32, 16], [32, 32]]")
    base = load([CONFIGS / "demo.yaml"], settings)
    tall, square = SampleShape(32, 16), SampleShape(32, 32)
    prompts = [Prompt(id=str(n), text="", shape=tall if n == 1 else square) for n in range(5)]
    units = evaluation_units(base, prompts, updates=3, policy="ema")
    assert [(unit.prompt_id, *unit.beside) for unit in units] == [("0", "2"), ("3", "4"), ("1",)]
    assert {unit.indices for unit in units} == {(0, 1)}
    assert len(evaluation_units(base, prompts, updates=0, policy="real")) == 5


def test_a_units_answer_counts_for_each_of_its_prompts() -> None:
    given: list[tuple[WorkUnit, tuple[Any, ...]]] = []

    class Worker(Regenerator):
        def give(self, unit: WorkUnit, batch: str, method: str, arguments: tuple[Any, ...], parts: int) -> None:
            given.append((unit, arguments))
            other = Evaluated(unit=replace(unit, prompt_id="bb", beside=()), rewards=(0.7,), **REST)
            value = Evaluated(unit=unit, rewards=(0.5,), beside=(other,), **REST)
            self._router.answered(self, unit, batch, value, None)

    async def scenario(tasks: Tasks) -> Evaluation:
        router = UnitRouter(Clock(), tasks, made_runs.config().fleet, Said(), lambda worker, why: None)  # type: ignore[arg-type]
        changes: list[tuple[int, int]] = []
        one = evaluation(
            "evaluation",
            router,
            PROMPTS,
            together=True,
            strict=True,
            tell=Said().message,
            changed=lambda done, total: changes.append((done, total)),
        )
        router.ready(Worker(router), ("old", 0))
        one.begin()
        await one.completed.wait()
        await one.finish()
        assert changes == [(2, 2)]
        return one

    found = in_a_run(scenario)
    ((unit, arguments),) = given
    assert arguments == (unit, PROMPTS, 2, "an embedding", "an embedding")
    assert {prompt_id: one.rewards for prompt_id, one in found.answers.items()} == {"aa": (0.5,), "bb": (0.7,)}


def test_a_runs_actors_are_found_by_whatever_way_its_folder_is_named(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    assert namespace(tmp_path / "link") == namespace(tmp_path / "runs" / ".." / "runs" / "demo") == namespace(run)
    assert namespace(tmp_path / "elsewhere" / "demo") != namespace(run)


class Regenerator:
    """Answers at once; every unit is also answered by a second worker, whose rewards are others."""

    pool, is_alone = "regenerators", False

    def __init__(self, router: UnitRouter) -> None:
        self.name, self._router = "regenerator-0", router

    def give(self, unit: WorkUnit, batch: str, method: str, arguments: tuple[Any, ...], parts: int) -> None:
        (prompt,) = (each for each in PROMPTS if each.id == unit.prompt_id)
        assert (method, arguments, parts) == ("evaluate", (unit, [prompt], 1, "an embedding"), 1)
        for name, rewards in (("regenerator-0", (0.5,)), ("regenerator-1", (0.5 if unit.prompt_id == "aa" else 0.7,))):
            self.name = name
            value = Evaluated(unit=unit, rewards=rewards, images=None, seconds=0.1, started=0.0)
            self._router.answered(self, unit, batch, value, None)
        self.name = "regenerator-0"


class Said(list[str]):
    """Keeps messages; what is told of units is not looked at."""

    def message(self, text: str) -> None:
        self.append(text)

    def unit(self, *seen: Any) -> None: ...

    def struck(self, worker: str) -> None: ...


class Clock:
    def now(self) -> float:
        return 0.0


def evaluation(
    name: str,
    router: UnitRouter,
    prompts: Sequence[Prompt],
    *,
    reproducible: bool = True,
    together: bool = False,
    **given: Any,
) -> Evaluation:
    config = made_runs.config()
    if together:
        evaluated = config.evaluation.model_copy(update={"micro_batch": len(prompts) * config.evaluation.samples})
        config = config.model_copy(update={"evaluation": evaluated})
    rewards = [reward.model_copy(update={"reproducible": reproducible}) for reward in config.rewards]
    config, embeddings = config.model_copy(update={"rewards": rewards}), dict.fromkeys(("aa", "bb"), "an embedding")
    return Evaluation(name, config, prompts, embeddings, router, updates=0, policy="old", **given)


def test_a_second_answer_for_one_evaluation_leaves_the_units_of_the_next_waiting() -> None:
    given: list[tuple[WorkUnit, str]] = []

    class Keeps(Regenerator):
        def give(self, unit: WorkUnit, batch: str, *arguments: Any) -> None:
            given.append((unit, batch))

    async def scenario(tasks: Tasks) -> None:
        router = UnitRouter(Clock(), tasks, made_runs.config().fleet, Said(), lambda worker, why: None)  # type: ignore[arg-type]
        worker = Keeps(router)
        first, second = (
            evaluation(name, router, PROMPTS[:1], strict=False, tell=Said().message) for name in ("first", "second")
        )
        router.ready(worker, ("old", 0))
        first.begin()
        await asyncio.sleep(0)
        ((unit, batch),) = given
        value = Evaluated(unit=unit, rewards=(0.5,), images=None, seconds=0.1, started=0.0)
        router.answered(worker, unit, batch, value, None)
        await asyncio.sleep(0)
        router.not_ready(worker)
        second.begin()
        router.answered(worker, unit, batch, value, None)  # of a worker that repeated it
        await asyncio.sleep(0)
        assert first.ledger.duplicates == 1
        router.ready(worker, ("old", 0))
        await asyncio.sleep(0)
        assert [unit.id for unit, _ in given[1:]] == [each.id for each in second.units]

    in_a_run(scenario)


def in_a_run(scenario: Callable[[Tasks], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with Tasks() as tasks:
            return await scenario(tasks)

    return asyncio.run(run())


def evaluated(*, strict: bool = False, reproducible: bool = True) -> tuple[Evaluation, Said]:
    said = Said()

    async def scenario(tasks: Tasks) -> Evaluation:
        router = UnitRouter(Clock(), tasks, made_runs.config().fleet, said, lambda worker, why: None)  # type: ignore[arg-type]
        one = evaluation("evaluation", router, PROMPTS, strict=strict, reproducible=reproducible, tell=said.message)
        router.ready(Regenerator(router), ("old", 0))
        one.begin()
        await one.completed.wait()
        await asyncio.sleep(0)  # second answers
        await one.finish()
        return one

    return in_a_run(scenario), said


def test_of_two_answers_that_differ_the_first_counts_and_that_is_told_and_counted() -> None:
    evaluation, said = evaluated()
    assert {prompt: each.rewards for prompt, each in evaluation.answers.items()} == {"aa": (0.5,), "bb": (0.5,)}
    assert (evaluation.ledger.duplicates, evaluation.ledger.violations) == (2, 1)
    (sentence,) = said
    assert sentence.startswith("regenerator-1 has other rewards for evaluate (after 0 updates, prompt bb, ")
    assert sentence.endswith(" than regenerator-0; the first ones count")


def test_where_fleet_strict_is_set_two_answers_that_differ_end_the_run() -> None:
    said = r"^regenerator-1 has other rewards for evaluate \(.* than regenerator-0, and fleet\.strict is true$"
    with pytest.raises(RunError, match=said):
        evaluated(strict=True)


def test_where_rewards_may_differ_others_are_duplicates_and_end_no_strict_run() -> None:
    evaluation, said = evaluated(strict=True, reproducible=False)
    assert (evaluation.ledger.duplicates, evaluation.ledger.violations) == (2, 0)
    assert {prompt: each.rewards for prompt, each in evaluation.answers.items()} == {"aa": (0.5,), "bb": (0.5,)}
    assert not list(said)
