"""An iteration under way: what is handed out when, what answers lead to, and what is noted of its stages."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.dispatch.open_iteration import RolloutResult, StageClock
from actors.dispatch.rollouts import Rollouts
from actors.overlap import Overlap
from actors.workers.selector import Selector
from actors.world import Tasks
from solrl_ray.errors import RewardError, RunError, WorkerGone
from tests.support.iteration_scene import PLAN, Reference, Scene, answer_to, ids, is_finished, samples, scene, settled
from tests.support.small import small_config


@pytest.mark.parametrize(
    ("staleness", "regenerated", "expected"),
    [
        (0, 14.0, {"explore": 10.0, "regenerate": 6.0}),
        (1, 14.0, {"ahead": 4.0, "explore": 6.0, "regenerate": 6.0}),  # the revision came while it was explored
        (1, 25.0, {"ahead": 10.0, "explore": 0.0, "regenerate": 6.0}),  # and after it was
        (1, 5.0, {"ahead": 0.0, "explore": 10.0, "regenerate": 6.0}),  # it was there first, as after a resume
        (1, None, {"ahead": 10.0, "explore": 0.0, "regenerate": 0.0}),  # all groups were there
    ],
)
def test_what_was_explored_before_the_iterations_revision_was_there_is_told_apart(
    staleness: int, regenerated: float | None, expected: dict[str, float]
) -> None:
    end = regenerated + 6.0 if regenerated is not None else 0.0
    clocks = {"explore": StageClock(10.0, 20.0), "regenerate": StageClock(regenerated, end)}
    assert RolloutResult([], [], [], clocks, staleness=staleness).walls == pytest.approx(expected)


@scene
async def test_units_go_from_explorers_to_regenerators_until_every_prompt_has_its_group(scene: Scene) -> None:
    this = await scene.begin()
    assert (this.candidates, this.pool_size) == (0, 8)
    explorer = await scene.worker("explorer-0", "explorers")
    regenerator = await scene.worker("regenerator-0", "regenerators")
    assert len(explorer.given) == 4
    assert regenerator.given == []
    scene.world.clock += 10.0
    await scene.answer(explorer)
    assert this.explored.is_set()
    assert this.candidates == 8
    assert ids(regenerator.given) == ["regenerate/4/beef/1-0", "regenerate/4/cafe/3-1"]
    assert not is_finished(this)
    scene.world.clock += 5.0
    await scene.answer(regenerator)
    assert is_finished(this)
    found = await this.finish()
    assert found.rewards == [(0.6, 0.1), (1.0, 0.25)]
    assert [group.value.prompt_id for group in found.groups] == ["beef", "cafe"]
    assert found.embeddings == ["embedding of beef", "embedding of cafe"]
    assert found.walls == {"explore": 10.0, "regenerate": 5.0}
    assert {name: clock.busy for name, clock in found.clocks.items()} == {"explore": 2.0, "regenerate": 4.0}
    assert (found.publication, found.requeued) == ({"bytes": 7.0}, 0)
    assert scene.watching.said == []
    this.clocks["regenerate"].add(200.0, 300.0, 100.0)  # a group that is made again later
    assert found.walls == {"explore": 10.0, "regenerate": 5.0}


@scene
async def test_a_unit_that_was_refused_once_may_be_refused_again_after_its_answer_was_accepted(scene: Scene) -> None:
    this = await scene.begin()
    await scene.answer(await scene.worker("explorer-0", "explorers"))
    first = await scene.worker("regenerator-0", "regenerators")
    await scene.worker("regenerator-1", "regenerators")
    (beef,) = [unit for unit in first.given if unit.prompt_id == "beef"] or [first.given[0]]
    scene.router.nonsense(first, beef, "NaN")
    await settled()
    scene.router.lost("regenerator-1")
    await settled()
    await scene.answer(first)
    assert is_finished(this)
    this.groups.pop(beef.prompt_id)
    scene.router.lost("regenerator-0")
    this._start([beef])  # its group was lost
    second = await scene.worker("regenerator-2", "regenerators")
    scene.router.nonsense(second, beef, "NaN")
    await settled()
    assert "strike 1 of 2 for regenerator-2" in scene.watching.said[-1]
    assert second.given == [beef, beef]


@pytest.mark.parametrize("staged", [False, True])
def test_a_prompt_is_regenerated_while_others_are_explored_unless_the_stages_are_apart(
    tmp_path: Path, staged: bool
) -> None:
    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            this = await scene.begin(staged=staged)
            explorer = await scene.worker("explorer-0", "explorers")
            regenerator = await scene.worker("regenerator-0", "regenerators")
            explorer.given, of_cafe = explorer.given[:2], explorer.given[2:]
            await scene.answer(explorer)
            assert ids(regenerator.given) == ([] if staged else ["regenerate/4/beef/1-0"])
            explorer.given = of_cafe
            await scene.answer(explorer)
            assert sorted(ids(regenerator.given)) == ["regenerate/4/beef/1-0", "regenerate/4/cafe/3-1"]
            await scene.answer(regenerator)
            assert is_finished(this)

    asyncio.run(acted())


@scene
async def test_what_rewards_cost_is_the_sum_over_all_accepted_answers(scene: Scene) -> None:
    this = await scene.begin()
    for name, pool in (("explorer-0", "explorers"), ("regenerator-0", "regenerators")):
        worker = await scene.worker(name, pool)
        for number, unit in enumerate(list(worker.given)):
            value, large = answer_to(unit, worker.name)
            costs = {"requests": 3, "retries": number} if number else None
            scene.router.answered(worker, unit, replace(value, reward_costs=costs), Reference(large))
        await settled()
    # Three of the four units of pools and one of the two groups have costs.
    assert (await this.finish()).reward_costs == {"requests": 3 * 4, "retries": 1 + 2 + 3 + 1}


@scene
async def test_an_iteration_goes_before_the_next(scene: Scene) -> None:
    this = await scene.begin(PLAN)
    ahead = await scene.begin(replace(PLAN, iteration=5, revision=5, staleness=1))
    explorer = await scene.worker("explorer-0", "explorers")
    assert [unit.iteration for unit in explorer.given] == [4] * 4 + [5] * 4
    await scene.answer(explorer)
    regenerator = await scene.worker("regenerator-0", "regenerators")
    assert [(unit.stage, unit.iteration) for unit in regenerator.given] == [("regenerate", 4)] * 2  # it holds that one
    assert not is_finished(this)
    await scene.answer(regenerator)
    assert is_finished(this)
    other = await scene.worker("regenerator-1", "regenerators", holds=("old", 5))
    assert other.given == []  # it is not known yet what regenerates
    ahead.revised(await scene.selector.revise(5, "ab"))
    await settled()
    assert [(unit.stage, unit.iteration) for unit in other.given] == [("regenerate", 5)] * 2


@scene
async def test_an_answer_to_another_unit_is_refused_and_so_is_what_the_selector_refuses(scene: Scene) -> None:
    this = await scene.begin()
    explorer = await scene.worker("explorer-0", "explorers")
    first, second, *_ = explorer.given
    value, _ = answer_to(first, explorer.name)
    scene.router.answered(explorer, second, value, None)
    await settled()
    assert scene.watching.said[0].startswith(
        f"{second.describe()} is repeated; strike 1 of 2 for explorer-0: "
        f"explorer-0 was given {second.describe()} of revision 4 and answered "
    )
    wrong = replace(value, rewards=(float("nan"), 0.5))
    scene.router.answered(explorer, first, wrong, None)
    await settled()
    assert "strike 2 of 2 for explorer-0: refused a result of explorer-0" in scene.watching.said[1]
    assert scene.retired == ["explorer-0"]
    assert this.candidates == 0
    scene.router.lost("explorer-0")
    other = await scene.worker("explorer-1", "explorers")
    await scene.answer(other)
    assert this.explored.is_set()


@scene
async def test_a_group_that_is_lost_on_its_way_is_made_again(scene: Scene) -> None:
    this = await scene.begin()
    await scene.answer(await scene.worker("explorer-0", "explorers"))
    regenerator = await scene.worker("regenerator-0", "regenerators")
    units = list(regenerator.given)
    await scene.answer(regenerator, lost=True)
    assert regenerator.given == units
    assert scene.watching.said == [f"{unit.describe()} is done again (an object it needs is lost)" for unit in units]
    await scene.answer(regenerator)
    assert is_finished(this)
    assert (await this.finish()).requeued == 2


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("damaged", [False, True])
def test_the_learner_gets_the_group_that_the_selector_keeps_if_its_acknowledgement_was_lost(
    tmp_path: Path, reproducible: bool, damaged: bool
) -> None:
    """A selector dies after it has written a group, the group's node is lost with it, and a repetition differs: in its
    samples, or, where scores are not reproducible, in its rewards alone.
    """

    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            this = await scene.begin(replace(PLAN, reproducible=reproducible))
            await scene.answer(await scene.worker("explorer-0", "explorers"))
            regenerator = await scene.worker("regenerator-0", "regenerators")
            beef, cafe = regenerator.given
            scene.selector._actor.accept_groups(samples(beef))
            scene.selector._actor._of(4).settle(wait=True)
            await scene.selector._restart(WorkerGone("the selector", "a test"))
            value, large = answer_to(beef, regenerator.name)
            assert large is not None
            other = replace(large, rewards=(9.0, 8.0))
            if reproducible:
                other = replace(other, latents=large.latents + 1)
            if damaged:
                next(tmp_path.rglob("beef.safetensors")).write_bytes(b"no more")
            regenerator.given = []
            scene.router.answered(regenerator, beef, replace(value, rewards=other.rewards), Reference(other))
            await settled()
            if damaged:  # it is made again, to the same bytes
                assert ids(regenerator.given) == ["regenerate/4/beef/1-0"]
                await scene.answer(regenerator)
            regenerator.given = [cafe]
            await scene.answer(regenerator)
            found = await this.finish()
            assert found.rewards == [(0.6, 0.1), (1.0, 0.25)]
            assert [group.value.latents.tolist() for group in found.groups] == [[[1.0], [0.0]], [[3.0], [1.0]]]
            assert (await scene.selector.close(4)).counts.violations == int(reproducible)

    asyncio.run(acted())


@scene
async def test_of_one_stage_groups_are_put_together_from_kept_samples_and_lost_ones_are_made_again(
    scene: Scene,
) -> None:
    this = await scene.begin(replace(PLAN, one_stage=True))
    explorer = await scene.worker("explorer-0", "explorers")
    await scene.answer(explorer, lost=True)
    assert this.explored.is_set()
    assert not this.groups
    # Of beef both chosen samples are in one unit.
    assert sorted(ids(explorer.given)) == ["sample/4/beef/0-1", "sample/4/cafe/0-1", "sample/4/cafe/2-3"]
    assert sorted(scene.watching.said) == [
        f"chosen samples of prompt {key} are made again (an object it needs is lost)" for key in ("beef", "cafe")
    ]
    await scene.answer(explorer)
    assert is_finished(this)
    assert (await this.finish()).rewards == [(0.6, 0.1), (1.0, 0.25)]
    assert [group.value.latents.tolist() for group in (await this.finish()).groups] == [[[1.0], [0.0]], [[3.0], [1.0]]]


def test_samples_that_are_made_again_with_other_bytes_end_the_run(tmp_path: Path) -> None:
    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            await scene.begin(replace(PLAN, one_stage=True))
            explorer = await scene.worker("explorer-0", "explorers")
            await scene.answer(explorer, lost=True)
            unit = explorer.given[0]
            value, large = answer_to(unit, explorer.name)
            other = replace(value, samples_digest="other bytes")
            scene.router.answered(explorer, unit, other, Reference(large))
            await settled()

    with pytest.raises(RunError, match=r"brought other bytes for sample .* than explorer-0, whose samples are lost"):
        asyncio.run(acted())


@scene
async def test_a_damaged_group_is_made_again_when_the_groups_are_wanted_once_more(scene: Scene) -> None:
    this = await scene.begin()
    await scene.answer(await scene.worker("explorer-0", "explorers"))
    regenerator = await scene.worker("regenerator-0", "regenerators")
    await scene.answer(regenerator)
    await scene.selector.close(4)
    next(scene.world._folder.rglob("cafe.safetensors")).write_bytes(b"no more")
    stored = asyncio.ensure_future(this.stored(nullcontext))
    await settled()
    assert ids(regenerator.given) == ["regenerate/4/cafe/3-1"]
    assert not is_finished(this)
    assert scene.watching.said == ["the stored group of prompt cafe is damaged: it is made again"]
    await scene.answer(regenerator)
    assert [group.value.prompt_id for group in await stored] == ["beef", "cafe"]


@scene
async def test_a_resumed_iteration_asks_for_what_its_journal_lacks(scene: Scene) -> None:
    before = Selector(scene.world._folder)
    first, second, third, _ = before.open(PLAN).units
    (_, ack, _) = before.accept([answer_to(unit, "explorer-0")[0] for unit in (first, second, third)])
    before.accept_groups(samples(ack.chosen))
    before._of(4).settle(wait=True)
    this = await scene.begin()
    assert (this.candidates, list(this.groups), this.rewards) == (6, ["beef"], {"beef": (0.6, 0.1)})
    explorer = await scene.worker("explorer-0", "explorers")
    assert ids(explorer.given) == ["explore/4/cafe/2-3"]
    regenerator = await scene.worker("regenerator-0", "regenerators")
    assert regenerator.given == []
    await scene.answer(explorer)
    await scene.answer(regenerator)
    assert is_finished(this)
    assert (await this.finish()).rewards == [(0.6, 0.1), (1.0, 0.25)]


@pytest.mark.parametrize("loses", ["", "explore/4/beef/0-1"])
def test_a_group_from_before_a_resume_is_not_made_again_after_exploring_ahead(tmp_path: Path, loses: str) -> None:
    """It comes with the policy that made it; its prompt may be explored until then, if the journal has lost a line."""
    ahead = replace(PLAN, staleness=1)

    async def acted() -> None:
        before = Selector(tmp_path)
        units = before.open(ahead).units
        acks = before.accept([answer_to(unit, "explorer-0")[0] for unit in units])
        before.revise(4, "bb")
        of_beef, _ = [ack.chosen for ack in acks if ack.chosen is not None]
        before.accept_groups(samples(of_beef))
        before._of(4).settle(wait=True)
        if loses:
            journal = next(tmp_path.rglob("*.jsonl"))
            header, first, *others = journal.read_bytes().splitlines(keepends=True)
            assert b'"beef"' in first
            journal.write_bytes(b"".join([header, *others]))
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            this = await scene.begin(ahead)
            assert this.groups == {}  # it is not known yet what regenerates
            explorer = await scene.worker("explorer-0", "explorers", ("old", 3))
            assert ids(explorer.given) == [loses] * bool(loses)
            await scene.answer(explorer)
            assert this.explored.is_set()
            regenerator = await scene.worker("regenerator-0", "regenerators")
            assert regenerator.given == []
            this.revised(await scene.selector.revise(4, "bb"))
            await settled()
            assert this.rewards == {"beef": (0.6, 0.1)}
            assert ids(regenerator.given) == ["regenerate/4/cafe/3-1"]
            await scene.answer(regenerator)
            assert is_finished(this)
            assert (await this.finish()).rewards == [(0.6, 0.1), (1.0, 0.25)]

    asyncio.run(acted())


@scene
async def test_units_of_a_lost_worker_are_counted_with_those_whose_answers_were_refused(scene: Scene) -> None:
    this = await scene.begin()
    gone = await scene.worker("explorer-0", "explorers")
    await scene.worker("explorer-1", "explorers")
    assert scene.router.lost(gone.name) == 4
    await settled()
    other = await scene.worker("explorer-0.1", "explorers")
    assert other.given == []  # explorer-1 has them
    scene.router.lost("explorer-1")
    await settled()
    value, _ = answer_to(other.given[0], other.name)
    refused = other.given.pop(0)
    scene.router.answered(other, refused, replace(value, rewards=(float("nan"), 0.5)), None)
    await settled()
    assert other.given[-1] == refused
    await scene.answer(other)
    await scene.answer(await scene.worker("regenerator-0", "regenerators"))
    assert (await this.finish()).requeued == 4 + 4 + 1


def test_an_error_of_a_unit_ends_the_run(tmp_path: Path) -> None:
    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            await scene.begin()
            explorer = await scene.worker("explorer-0", "explorers")
            scene.router.failed(explorer, explorer.given[0], RewardError("no tokenizer"))
            await settled()

    with pytest.raises(RewardError, match=r"^no tokenizer$"):
        asyncio.run(acted())


@scene
async def test_what_a_new_selector_knows_already_is_not_handed_out_and_what_is_at_work_not_twice(scene: Scene) -> None:
    this = await scene.begin()
    explorer = await scene.worker("explorer-0", "explorers")
    first, *others = explorer.given
    # The old one has journaled an answer and dies before it acknowledges that.
    scene.selector._actor.accept([answer_to(first, explorer.name)[0]])
    await scene.selector._restart(WorkerGone("the selector", "a test"))
    late = await scene.worker("explorer-1", "explorers")
    assert late.given == []
    explorer.given = others
    await scene.answer(explorer)
    assert len(this._unexplored) == 1  # its acknowledgement is on its way
    explorer.given = [first]
    await scene.answer(explorer)
    assert this.explored.is_set()
    regenerator = await scene.worker("regenerator-0", "regenerators")
    assert sorted(ids(regenerator.given)) == ["regenerate/4/beef/1-0", "regenerate/4/cafe/3-1"]


@pytest.mark.parametrize("one_stage", [False, True])
@pytest.mark.parametrize("explored", [3, 4])
def test_whatever_line_its_disk_has_lost_a_new_selector_is_told_what_the_old_one_knew(
    tmp_path: Path, one_stage: bool, explored: int
) -> None:
    """Nothing is made again: explorers may hold the next revision by then. And nobody is blamed."""

    async def acted(folder: Path, line: int) -> None:
        async with Tasks() as tasks:
            scene = Scene(folder, tasks)
            this = await scene.begin(replace(PLAN, one_stage=one_stage))
            explorer = await scene.worker("explorer-0", "explorers")
            explorer.given, rest = explorer.given[:explored], explorer.given[explored:]
            await scene.answer(explorer)
            await damaged(scene, line)
            assert any(f"line {line + 1} of" in said and "is damaged" in said for said in scene.watching.said)
            explorer.given += rest
            await scene.answer(explorer)
            await scene.answer(await scene.worker("regenerator-0", "regenerators"))
            assert is_finished(this)
            assert (await this.finish()).rewards == [(0.6, 0.1), (1.0, 0.25)]
            await damaged(scene, line)
            assert [group.value.prompt_id for group in await this.stored(nullcontext)] == ["beef", "cafe"]
            assert not isinstance(await scene.selector.close(4), tuple)
            assert explorer.given == []
            assert not [said for said in scene.watching.said if "strike" in said or "done again" in said]

    for line in range(1 + explored):  # the header, and at least as many as there are results
        asyncio.run(acted(tmp_path / str(line), line))


async def damaged(scene: Scene, line: int) -> None:
    """Restart the selector, where a line of the journal has another byte."""
    scene.selector._actor._of(4).settle(wait=True)
    journal = next(scene.world._folder.rglob("*.jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"', b"'", 1)
    journal.write_bytes(b"".join(lines))
    await scene.selector._restart(WorkerGone("the selector", "a test"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_that_only_a_dead_selector_had_is_made_again_when_the_iteration_is_closed_until_it_is_there(
    tmp_path: Path, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            this = await scene.begin(replace(PLAN, staleness=staleness))
            await scene.answer(await scene.worker("explorer-0", "explorers", ("old", 4 - staleness)))
            if staleness:
                this.revised(await scene.selector.revise(4, "bb"))
            regenerator = await scene.worker("regenerator-0", "regenerators")
            await scene.answer(regenerator)
            assert is_finished(this)
            close, times = scene.selector.close, 0

            async def closed(iteration: int) -> Any:
                nonlocal times
                times += 1
                if times < 3:
                    await lost(scene, "beef")
                return await close(iteration)

            monkeypatch.setattr(scene.selector, "close", closed)
            rollouts: Any = Rollouts.__new__(Rollouts)
            rollouts._selector, rollouts._open, rollouts._telemetry = scene.selector, {4: this}, scene.watching
            summary = tasks.start(rollouts.close(4, nullcontext), "closing")
            for _ in range(2):
                await settled()
                assert ids(regenerator.given) == ["regenerate/4/beef/1-0"]
                await scene.answer(regenerator)
            assert (await summary).counts.groups == 2

    asyncio.run(acted())


async def lost(scene: Scene, prompt_id: str) -> None:
    """Restart the selector; neither its disk nor anybody else has a prompt's group any more."""
    scene.selector._actor._of(4).settle(wait=True)
    for group in scene.selector._groups[4]:
        group.lost = group.lost or group.value.prompt_id == prompt_id
    next(scene.world._folder.rglob(f"{prompt_id}.safetensors")).unlink()
    await scene.selector._restart(WorkerGone("the selector", "a test"))


def test_groups_are_offered_to_the_learners_in_prompt_order_and_once_as_far_as_none_is_missing(tmp_path: Path) -> None:
    plan = replace(PLAN, prompt_ids=tuple("abcd"))

    async def acted() -> None:
        async with Tasks() as tasks:
            scene = Scene(tmp_path, tasks)
            this = await scene.begin(plan)
            offered: list[tuple[Any, ...]] = []

            class Learners:
                def offer(self, *arguments: Any) -> None:
                    offered.append(arguments)

            run: Any = SimpleNamespace(config=small_config(tmp_path, "run"), rollouts={4: this}, learners=Learners())
            tasks.start(Overlap(run, tasks)._offer(4), "offering")
            sizes, said = [2] * 4, []
            for key in "bacd":
                this._give_to_learner(key, (1.0, 0.0), key.upper())
                await settled()
                said.append(offered[:])
                offered.clear()
            assert said == [
                [],
                [(4, sizes, 0, ["A", "B"], ["embedding of a", "embedding of b"])],
                [(4, sizes, 2, ["C"], ["embedding of c"])],
                [(4, sizes, 3, ["D"], ["embedding of d"])],
            ]

    asyncio.run(acted())
