"""An open iteration with a real selector and router; workers and learners are played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from actors.dispatch.open_iteration import OpenIteration
from actors.dispatch.selector_client import SelectorClient
from actors.dispatch.unit_router import Call, UnitRouter
from actors.workers.selector import Selector
from actors.world import Sent, Tasks
from solrl_ray.config.fleet import FleetConfig
from solrl_ray.errors import InputGone, RunError
from solrl_ray.metrics.records import EventKind
from solrl_ray.records import Prompt, SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan, group_digest
from solrl_ray.scheduling.worker_state import Replacements

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=4, keep=2, unit=2)
REWARDS = {"beef": (0.1, 0.6, 0.3, 0.5), "cafe": (0.5, 0.25, 0.75, 1.0)}
"""Best and worst: 1 and 0 of beef; 3 and 1 of cafe."""
OLD = "old", 4


@dataclass(slots=True, eq=False)
class Reference:
    """Of an object, which may be lost."""

    value: Any
    lost: bool = False


class Here:
    """A world in which the selector is an object of this process, and answers at once."""

    node = "here"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.clock = 100.0

    def now(self) -> float:
        return self.clock

    def selector(self, name: str) -> Selector:
        return Selector(self._folder)

    def kill(self, actor: Any) -> None:
        pass

    def send(self, actor: Any, method: str, *arguments: Any, parts: int = 1) -> Sent:
        given = [each.value if isinstance(each, Reference) else each for each in arguments]
        try:
            if any(isinstance(each, Reference) and each.lost for each in arguments):
                raise InputGone(method, "an object it needs is lost")
            answer = getattr(actor, method)(*given)
        except RunError as error:
            return Sent(error)
        return Sent(answer[0], Reference(answer[1])) if parts == 2 else Sent(answer)

    async def answer(self, sent: Sent, *, what: str, seconds: float | None) -> Any:
        await asyncio.sleep(0)
        if isinstance(sent.answer, Exception):
            raise sent.answer
        return sent.answer

    def put(self, value: Any) -> Reference:
        return Reference(value)

    def exporter(self, run: str) -> None: ...


class Watching:
    """Hears what a user is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def unit(self, worker: str, unit: WorkUnit, started: float, seconds: float) -> None: ...

    def struck(self, worker: str) -> None: ...

    def message(self, text: str, kind: EventKind = "note") -> None:
        self.said.append(text)


class Hand:
    """A worker that answers when the test wants it."""

    is_alone = False

    def __init__(self, name: str, pool: str) -> None:
        self.name, self.pool = name, pool
        self.given: list[WorkUnit] = []

    def give(self, unit: WorkUnit, call: Call) -> None:
        arguments = unit, Prompt(id=unit.prompt_id, text=""), f"embedding of {unit.prompt_id}"
        assert call == Call(unit.stage, arguments, 2 if unit.stage in ("sample", "regenerate") else 1)
        self.given.append(unit)


class Scene:
    """An open iteration with a real selector and dispatcher."""

    def __init__(self, folder: Path, tasks: Tasks) -> None:
        self.tasks = tasks
        self.world = cast(Any, Here(folder))
        self.watching = Watching()
        self.retired: list[str] = []
        fleet, told = FleetConfig(max_inflight=9, strikes=2), cast(Any, self.watching)
        self.router = UnitRouter(self.world, fleet, told, lambda name, _: self.retired.append(name))
        self.selector = SelectorClient(
            self.world,
            tasks,
            seconds=60.0,
            replacements=Replacements(2),
            tell=lambda text, kind="note": self.watching.said.append(text),
        )

    async def begin(self, plan: IterationPlan = PLAN, *, staged: bool = False) -> OpenIteration:
        this = OpenIteration(
            plan,
            [Prompt(id=key, text="") for key in plan.prompt_ids],
            {key: f"embedding of {key}" for key in plan.prompt_ids},
            world=self.world,
            tasks=self.tasks,
            router=self.router,
            selector=self.selector,
            publication=lambda: {"bytes": 7.0},
            tell=self.watching.said.append,
            changed=lambda: None,
            staged=staged,
        )
        this.begin(await self.selector.open(plan))
        await settled()
        return this

    async def worker(self, name: str, pool: str, holds: tuple[str, int] = OLD) -> Hand:
        hand = Hand(name, pool)
        self.router.ready(hand, holds)
        await settled()
        return hand

    async def answer(self, hand: Hand, *, lost: bool = False) -> None:
        """Answer all that it has been given."""
        units, hand.given = hand.given, []
        for unit in units:
            value, large = answer_to(unit, hand.name)
            self.router.answered(hand, unit, value, Reference(large, lost=lost))
        await settled()


async def settled() -> None:
    """Until everything that can go on has gone on."""
    for _ in range(100):
        await asyncio.sleep(0)


def samples(unit: WorkUnit) -> SampleGroup:
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=tuple(REWARDS[unit.prompt_id][i] for i in unit.indices),
        latents=torch.tensor([[float(i)] for i in unit.indices]),
        seconds=2.0,
        worker="w",
    )


def answer_to(unit: WorkUnit, worker: str) -> tuple[Any, SampleGroup | None]:
    """Its small part, and the large one."""
    group = samples(unit)
    digest = group_digest(group) if unit.stage == "sample" else ""
    seconds = group.seconds if unit.stage == "regenerate" else 0.5
    result = UnitResult(
        unit=unit, rewards=group.rewards, worker=worker, score_class="c", seconds=seconds, samples_digest=digest
    )
    return result, group if unit.stage in ("sample", "regenerate") else None


def is_finished(this: OpenIteration) -> bool:
    return all(task.done() for task in this._prompts_at_work.values())


def ids(units: list[WorkUnit]) -> list[str]:
    return [unit.id for unit in units]


def scene(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """A test that is given a scene."""

    def run(tmp_path: Path) -> None:
        async def acted() -> None:
            async with Tasks() as tasks:
                await test(Scene(tmp_path, tasks))

        asyncio.run(acted())

    run.__name__ = test.__name__
    return run
