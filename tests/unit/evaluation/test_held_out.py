"""Held-out evaluation without workers: its units, and the name by which a run's actors are found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.names import namespace
from actors.dispatch.unit_router import Call, UnitRouter
from actors.evaluation.evaluator import score_policy
from actors.workers.regenerator import Evaluated
from actors.world import first_error
from solrl_ray.config.loading import load
from solrl_ray.errors import RewardError
from solrl_ray.evaluation.held_out import EVAL_POLICIES, UNIT_POLICY, evaluation_units
from solrl_ray.records import Prompt, SampleShape, WorkUnit
from solrl_ray.scheduling.dispatcher import Held
from tests.support import made_runs

CONFIGS = Path(__file__).parents[3] / "configs"
PROMPTS = [Prompt(id="aa", text="a red circle"), Prompt(id="bb", text="two green triangles")]


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


def test_a_runs_actors_are_found_by_whatever_way_its_folder_is_named(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    assert namespace(tmp_path / "link") == namespace(tmp_path / "runs" / ".." / "runs" / "demo") == namespace(run)
    assert namespace(tmp_path / "elsewhere" / "demo") != namespace(run)


class Telemetry:
    def unit(self, *seen: Any) -> None: ...


class Clock:
    def now(self) -> float:
        return 0.0


class Regenerator:
    """Answers each unit at once: the n-th prompt that it sees scores n."""

    name, pool, is_alone = "regenerator-0", "regenerators", False

    def __init__(self) -> None:
        nothing: Any = Telemetry()
        clock: Any = Clock()
        self.router = UnitRouter(clock, made_runs.config().fleet, nothing, lambda worker, why: None)
        self.given: list[tuple[WorkUnit, Call]] = []
        self.prompts = 0

    def give(self, unit: WorkUnit, call: Call) -> None:
        self.given.append((unit, call))
        found = []
        for prompt_id in (unit.prompt_id, *unit.beside):
            self.prompts += 1
            each = unit if prompt_id == unit.prompt_id else replace(unit, prompt_id=prompt_id, beside=())
            found.append(Evaluated(unit=each, rewards=(float(self.prompts),), images=None, seconds=0.1, started=0.0))
        self.router.answered(self, unit, replace(found[0], beside=tuple(found[1:])), None)


def scored(
    held: Held, *, embeddings: Mapping[str, str], at_once: int = 1, **how: Any
) -> tuple[Regenerator, dict[str, Evaluated], list[tuple[int, int]]]:
    """A regenerator that scores `PROMPTS`, of which one is pictured; the scores, and the progress."""
    config, changes = made_runs.config(), list[tuple[int, int]]()
    evaluated = config.evaluation.model_copy(update={"micro_batch": at_once * config.evaluation.samples, "pictures": 1})
    config = config.model_copy(update={"evaluation": evaluated})

    async def scenario() -> tuple[Regenerator, dict[str, Evaluated], list[tuple[int, int]]]:
        worker = Regenerator()
        worker.router.ready(worker, held)

        def changed(done: int, total: int) -> None:
            changes.append((done, total))

        asked = score_policy(config, PROMPTS, embeddings, worker.router, updates=0, changed=changed, **how)
        return worker, await asyncio.wait_for(asked, 60.0), changes

    return asyncio.run(scenario())


EMBEDDED = {"aa": "embedding of aa", "bb": "embedding of bb"}


def test_each_prompt_is_a_unit_in_their_order_and_the_first_ones_have_their_pictures_sent() -> None:
    worker, found, changes = scored(("ema", 0), embeddings=EMBEDDED, policy="ema")
    assert [call for _, call in worker.given] == [
        Call("evaluate", (unit, [prompt], images, f"embedding of {prompt.id}"))
        for (unit, _), prompt, images in zip(worker.given, PROMPTS, (1, 0), strict=True)
    ]
    assert {(unit.policy, unit.revision) for unit, _ in worker.given} == {("ema", 0)}
    assert {prompt_id: one.rewards for prompt_id, one in found.items()} == {"aa": (1.0,), "bb": (2.0,)}
    assert changes == [(1, 2), (2, 2)]


def test_a_units_answer_counts_for_each_of_its_prompts() -> None:
    worker, found, changes = scored(("old", 0), embeddings=EMBEDDED, policy="old", at_once=2)
    ((unit, call),) = worker.given
    assert (unit.prompt_id, unit.beside) == ("aa", ("bb",))
    assert call.arguments == (unit, PROMPTS, 1, "embedding of aa", "embedding of bb")
    assert {prompt_id: one.rewards for prompt_id, one in found.items()} == {"aa": (1.0,), "bb": (2.0,)}
    assert all(one.beside == () for one in found.values())
    assert changes == [(2, 2)]


def test_real_pictures_are_scored_by_whoever_holds_the_stated_policy_with_the_embeddings_that_exist() -> None:
    worker, found, _ = scored(
        ("old", 0), embeddings={"bb": "embedding of bb"}, policy="real", method="score_reference", holds=("old", 0)
    )
    assert {(call.method, unit.policy) for unit, call in worker.given} == {("score_reference", "real")}
    assert [call.arguments[3:] for _, call in worker.given] == [(), ("embedding of bb",)]
    assert sorted(found) == ["aa", "bb"]


def test_an_error_of_a_prompt_ends_the_evaluation_which_leaves_no_unit_behind() -> None:
    class Fails(Regenerator):
        def give(self, unit: WorkUnit, call: Call) -> None:
            self.given.append((unit, call))
            self.router.failed(self, unit, RewardError("no tokenizer"))

    async def scenario() -> None:
        worker = Fails()
        asked = score_policy(
            made_runs.config(), PROMPTS, EMBEDDED, worker.router, updates=0, policy="ema", changed=lambda *_: None
        )
        evaluating = asyncio.create_task(asked)
        await asyncio.sleep(0)
        worker.router.ready(worker, ("ema", 0))
        with pytest.raises(ExceptionGroup) as caught:
            await evaluating
        assert isinstance(first_error(caught.value), RewardError)
        given = len(worker.given)
        worker.router.ready(worker, ("ema", 0))
        await asyncio.sleep(0.01)
        assert len(worker.given) == given

    asyncio.run(scenario())
