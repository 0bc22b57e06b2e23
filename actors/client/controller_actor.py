"""The controller as a Ray actor: the methods that other processes call on a live run (progress, scaling).

A process that looks up an actor imports the module of its class. So this module imports little; the controller's module
takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress


class ControllerActor:
    """All methods are coroutines, so they answer while `run` is running."""

    _name = "controller"
    """Default for `__repr__`, which Ray also calls if the constructor failed or never ran. An AttributeError would hide
    the real error.
    """

    def __init__(self, config: Config, folder: Path, classes: Any) -> None:
        """`classes`: `actors.fleet.actor_factory.ActorClasses`."""
        self._name = f"controller of {config.run.name}, {config.run.iterations} iterations"
        from actors.controller import Controller
        from actors.fleet.actor_factory import ActorFactory
        from actors.ray_world import RayWorld

        self._controller = Controller(config, folder, RayWorld(ActorFactory(config, folder, classes)))

    def __repr__(self) -> str:
        """Title in Ray's dashboard and before each log line of this process."""
        return self._name

    async def run(self) -> None:
        await self._controller.run()

    async def progress(self, since: int = 0) -> Progress:
        return await self._controller.progress(since)

    async def note(self, worker: str, words: str) -> None:
        """Receive an actor's note about a long call; see `actors.cluster.progress_notes`."""
        self._controller.note(worker, words)

    async def scale(self, sizes: Mapping[str, int]) -> str:
        return await self._controller.scale(sizes)
