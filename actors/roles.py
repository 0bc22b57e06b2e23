"""Which class plays which part, and how its actor is made. Tests and benchmarks put other players in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.encoder import Encoder
from actors.explorer import Explorer
from actors.learner import LearnerRank
from actors.regenerator import Regenerator
from actors.selector import Selector
from solrl_ray.config.schema import Config, Worker


@dataclass(frozen=True, slots=True)
class Roles:
    """Plain classes; they become actors when they are spawned."""

    encoder: type = Encoder
    explorer: type = Explorer
    regenerator: type = Regenerator
    learner: type = LearnerRank
    selector: type = Selector


class Stage:
    """Makes the actors of a run: readable names, explicit resources, no retries or restarts of Ray's own."""

    def __init__(self, config: Config, folder: Path, roles: Roles) -> None:
        self._config = config
        self._folder = folder
        self._roles = roles

    def encoder(self) -> Any:
        return _actor(self._roles.encoder, "encoder").remote(self._config, self._folder / "embeddings")

    def selector(self) -> Any:
        return _actor(self._roles.selector, "selector").remote(self._folder)

    def explorer(self, name: str) -> Any:
        return _actor(self._roles.explorer, name, self._config.fleet.explorers).remote(name, self._config)

    def regenerator(self, name: str) -> Any:
        worker = self._config.fleet.regenerators
        return _actor(self._roles.regenerator, name, worker).remote(name, self._config)

    def learner(self, rank: int) -> Any:
        worker = self._config.fleet.learners
        return _actor(self._roles.learner, f"learner-{rank}", worker).remote(self._config, rank)


def _actor(role: type, name: str, worker: Worker | None = None) -> Any:
    make: Callable[..., Any] = ray.remote(role).options
    return make(
        name=name,
        num_cpus=worker.num_cpus if worker else 0,
        num_gpus=worker.num_gpus if worker else 0,
        max_restarts=0,
        max_task_retries=0,
    )
