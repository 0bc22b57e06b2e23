"""The rollout beside a selector in the same process, and a regenerator that answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.dispatch.open_iteration import OpenIteration
from actors.dispatch.rollout import Rollout
from actors.fleet.budget import Budget
from actors.fleet.events import Done
from actors.fleet.member import Member
from actors.fleet.pool import Pool
from actors.workers.regenerator import GroupReport
from actors.workers.selector import Ack, Opened, Selector
from solrl_ray.config.schema import Deadlines
from solrl_ray.errors import RunError
from solrl_ray.records import Prompt, SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.worker_state import State
from tests.unit.actors.test_selector import regenerated

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=2, keep=2, micro_batch=2)


class Near(Selector):
    """A selector that is asked without messages."""

    restarts = 0

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def take_groups(self, iteration: int, groups: Sequence[SampleGroup]) -> list[Ack]:  # type: ignore[override]
        return super().take_groups(*groups)

    def stored(self, iteration: int, prompt_id: str) -> Any:
        return super().stored(iteration, prompt_id)[1]


@dataclass
class Workers:
    """A pool of one, and a fleet of such pools."""

    name: str = ""
    given: list[WorkUnit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.explorers, self.regenerators = {"explorers": self}, self

    def slots(self, max_inflight: int | None = None) -> list[str]:
        return [self.name] if self.name else []

    def give(self, worker: str, unit: WorkUnit, method: str, *inputs: Any, parts: int) -> None:
        self.given.append(unit)

    def hedges(self, pool: Any) -> list[Any]:
        return []

    def events(self, *, seconds: float, needed: bool = True) -> list[Done]:
        if not self.given:
            raise RunError("no worker has a call in flight, yet the work is not done")
        done, self.given = self.given, []
        groups = [regenerated(unit) for unit in done]
        reports = [GroupReport(prompt_id=g.prompt_id, rewards=g.rewards, seconds=0.1, started=0.0) for g in groups]
        return [Done(self.name, *each) for each in zip(done, reports, groups, strict=True)]


class Ordered(Workers):
    """Take everything, and answer for one prompt at a time, in this order."""

    publication_counts: Mapping[str, float] = {}
    order = ("cafe", "beef", "dead")

    def slots(self, max_inflight: int | None = None) -> list[str]:
        return [self.name] * 3 if self.name else []

    def events(self, *, seconds: float, needed: bool = True) -> list[Done]:
        self.given.sort(key=lambda unit: self.order.index(unit.prompt_id))
        held = self.given[1:]
        del self.given[1:]
        done = super().events(seconds=seconds, needed=needed)
        self.given = held
        return done


class Quiet:
    def message(self, text: str) -> None: ...

    def stage(self, name: str, done: int, total: int) -> None: ...


def test_a_damaged_group_is_made_again_also_for_an_update_that_was_done_before(tmp_path: Path) -> None:
    """The learners are lost with their samples after the update, and before its state is saved."""
    selector, workers = Near(tmp_path), Workers()
    workers.regenerators = Workers("regenerator-0")
    workers.events = workers.regenerators.events  # type: ignore[method-assign]
    selector.open(PLAN)
    for _, unit in selector.lease(4, "explore", ["explorer-0"] * 2):
        ready = selector.record(UnitResult(unit=unit, rewards=(0.1, 0.6), worker="", score_class="c", seconds=0.1))
        assert ready is not None
        selector.store(regenerated(ready))
    rollout = Rollout(workers, selector, Quiet())  # type: ignore[arg-type]
    prompts = [Prompt(id=prompt_id, text="") for prompt_id in PLAN.prompt_ids]
    this = OpenIteration(PLAN, prompts, dict.fromkeys(PLAN.prompt_ids), Opened(groups=(), candidates=4))
    this.groups = dict.fromkeys(PLAN.prompt_ids, "gone with its node")
    rollout._open[4] = this
    rollout.regenerate(4, policy_digest="d")
    rollout.learned(4)
    selector.close(4)  # what was taken is on the disk from here on
    next(tmp_path.rglob("beef.safetensors")).write_bytes(b"damaged")
    assert [group.prompt_id for group in rollout.supply()] == ["beef", "cafe"]
    assert this.groups["beef"].rewards == (0.9, 0.1)


def test_slots_are_of_the_least_busy_first_and_may_be_those_of_first_units_alone() -> None:
    pool = Pool(lambda name: None, unit_seconds=60.0, max_inflight=2, deadlines=Deadlines(), budget=Budget(0))
    pool._members |= {name: Member(name, None, opened=0.0, state=State.READY) for name in ("a", "b", "c")}
    pool._members["a"].units = 1
    assert pool.slots() == ["b", "c", "a", "b", "c"]
    assert pool.slots(max_inflight=1) == ["b", "c"]


def test_groups_are_offered_to_the_learners_while_others_are_still_made(tmp_path: Path) -> None:
    plan = replace(PLAN, prompt_ids=("beef", "cafe", "dead"))
    selector, workers = Near(tmp_path), Ordered()
    workers.regenerators = Ordered("regenerator-0")
    workers.events = workers.regenerators.events  # type: ignore[method-assign]
    rollout = Rollout(workers, selector, Quiet())  # type: ignore[arg-type]
    prompts = [Prompt(id=prompt_id, text="") for prompt_id in plan.prompt_ids]
    rollout.open(plan, prompts, {prompt_id: f"of {prompt_id}" for prompt_id in plan.prompt_ids})
    this = rollout._open[4]
    for _, unit in selector.lease(4, "explore", ["explorer-0"] * 3):
        selector.record(UnitResult(unit=unit, rewards=(0.1, 0.6), worker="", score_class="c", seconds=0.1))
        this.recorded(unit, 0.1)
    rollout.regenerate(4, policy_digest="d")
    seen = []

    def offer(sizes: list[int], first: int, groups: list[Any], embeddings: list[Any]) -> None:
        seen.append((len(this.groups), sizes, first, [group.prompt_id for group in groups], embeddings))

    rolled = rollout.run(4, explored=lambda: None, offer=offer)
    assert seen == [
        (2, [2, 2, 2], 0, ["beef", "cafe"], ["of beef", "of cafe"]),
        (3, [2, 2, 2], 2, ["dead"], ["of dead"]),
    ]
    assert [group.prompt_id for group in rolled.groups] == ["beef", "cafe", "dead"]
