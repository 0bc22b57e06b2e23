"""Fleets of small real actors, and what is told of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from actors.fleet.actor_factory import Actor
from actors.fleet.fleet import Fleet
from actors.fleet.pool import Pool
from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.world import Tasks
from solrl_ray.config.schema import Config
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.publication import Publication
from tests.chaos.pools import spawn, world
from tests.support.patience import until
from tests.support.small import small_config


@dataclass
class Scene:
    """A fleet, and what is told of it."""

    fleet: Fleet
    telemetry: Telemetry
    world: RayWorld
    config: Config

    @property
    def said(self) -> tuple[str, ...]:
        return self.telemetry.progress().messages

    @property
    def explorers(self) -> Pool:
        return self.fleet.explorers["explorers"]

    def ready(self, pool: Pool | None = None) -> list[str]:
        return [name for name, each in (pool or self.explorers).workers.items() if each.words() == "ready"]

    async def publish(self, role: str, publication: Publication) -> None:
        await self.fleet.publish(role, publication, ray.put("probe"))

    async def says(self, sentence: str) -> None:
        """Return once a message has it."""
        await until(lambda: any(sentence in message for message in self.said))


def regenerator(name: str) -> Actor:
    return spawn(name, "C")


@asynccontextmanager
async def opened(
    folder: Path,
    explorer: Callable[[str], Actor] = spawn,
    *overrides: str,
    regenerator: Callable[[str], Actor] = regenerator,
    explores: bool = True,
) -> AsyncIterator[Scene]:
    """An open fleet of such workers; one of each, unless an override says another number. What ends a run is raised."""
    config, there = small_config(folder, "fleet", *overrides), world(explorer, regenerator)
    async with Tasks() as tasks:
        telemetry = Telemetry(config, RunFolder(folder), there)
        tasks.start(telemetry.keep_writing(), "writing metrics")
        fleet = Fleet(config, there, tasks, telemetry, explores=explores)
        fleet.open()
        yield Scene(fleet, telemetry, there, config)
