"""The controller as an actor: what other processes may ask of a live run (progress, other pool sizes).

Every process that asks for an actor imports the module of its class. So this module is light; importing the
controller's takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress


class ControllerActor:
    """All methods are asynchronous, so they answer while `run` is at work."""

    _name = "controller"
    """Ray asks for it also after a constructor that raised, or was never called, and would report its error instead."""

    def __init__(self, config: Config, folder: Path, classes: Any) -> None:
        """`classes`: `actors.fleet.actor_factory.ActorClasses`."""
        self._name = f"controller of {config.run.name}, {config.run.iterations} iterations"
        from actors.controller import Controller
        from actors.fleet.actor_factory import ActorFactory
        from actors.ray_world import RayWorld

        self._controller = Controller(config, folder, RayWorld(ActorFactory(config, folder, classes)))

    def __repr__(self) -> str:
        """Shown in Ray's dashboard and before each line that this process logs."""
        return self._name

    async def run(self) -> None:
        await self._controller.run()

    async def progress(self, since: int = 0) -> Progress:
        return await self._controller.progress(since)

    async def note(self, worker: str, words: str) -> None:
        """Take an actor's note about a long call; see `actors.cluster.progress_notes`."""
        self._controller.note(worker, words)

    async def scale(self, sizes: Mapping[str, int]) -> str:
        return await self._controller.scale(sizes)
