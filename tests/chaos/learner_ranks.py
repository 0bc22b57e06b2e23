"""Groups of learner ranks, real ones or such without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from actors.fleet.actor_factory import Actor, ActorClasses, ActorFactory
from actors.ray_world import RayWorld
from actors.training.learner_group import LearnerGroup
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import LearnerState
from solrl_ray.scheduling.worker_state import Replacements


class Light:
    """A rank that only knows where it is and what it was told to load."""

    def __init__(self, config: Config, rank: int) -> None:
        self._loaded: object = None

    def start(self) -> str:
        return "here"

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def address(self) -> tuple[str, int]:
        return "here", 1

    def join(self, address: str, port: int, one_host: bool) -> None:
        pass

    def load(self, state: object) -> None:
        self._loaded = state

    def state(self) -> tuple[str, object, int]:
        context = ray.get_runtime_context()
        place = ray.util.get_current_placement_group()
        assert place is not None
        return context.get_actor_name(), self._loaded, place.bundle_count


def light_group(settings: Config, factory: ActorFactory, said: list[str]) -> LearnerGroup:
    async def last_state() -> Any:
        return "the checkpoint"

    async def supply(iteration: int) -> list[Any]:
        return []

    return LearnerGroup(
        settings,
        RayWorld(factory),
        last_state=last_state,
        replacements=Replacements(0),
        tell=lambda text, kind="note": said.append(text),
        supply=supply,
    )


async def group(
    settings: Config, folder: Path, role: type, said: list[str], supply: Callable[[int], Any] | None = None
) -> LearnerGroup:
    """Ranks that need no place of their own, and begin again with the last state in `folder`."""

    class Anywhere(ActorFactory):
        def learner(self, rank: int, rebuilt: int = 0) -> Actor:
            name = f"{folder.name}-learner-{rank}" + (f".{rebuilt}" if rebuilt else "")
            make: Any = ray.remote(role).options(name=name, num_cpus=0)
            return Actor(make.remote(settings, rank), "learner")

        def reserve_learner_bundles(self, seconds: float) -> bool:
            return True

    async def last_state() -> LearnerState | None:
        there = sorted(folder.glob("state-*"))
        return LearnerState.load(there[-1]) if there else None

    async def nothing(iteration: int) -> list[Any]:
        raise AssertionError(f"groups of iteration {iteration} were asked for again")

    learners = LearnerGroup(
        settings,
        RayWorld(Anywhere(settings, folder, ActorClasses())),
        last_state=last_state,
        replacements=Replacements(2),
        tell=lambda text, kind="note": said.append(text),
        supply=supply or nothing,
    )
    await learners.spawn()
    return learners
