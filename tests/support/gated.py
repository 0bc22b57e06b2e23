"""Explorers that wait at gates, so that a test can act while units are at work; also as a run of its own process."""

from __future__ import annotations

import time
from pathlib import Path

from actors.workers.explorer import Explorer
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit


class Gated(Explorer):
    """Does the units of iterations 1 and 2 only once the file ``gate-<iteration>`` is beside the run folder."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        root = Path(self._config.run.root)
        (root / f"at-gate-{unit.iteration}-{self._name}").touch()
        while unit.iteration > 0 and not (root / f"gate-{unit.iteration}").exists():
            time.sleep(0.05)
        return super().explore(unit, prompt, embedding)


def train(address: str, file: str) -> None:
    """On the cluster at `address`, as `file` says."""
    from actors.client import launch
    from actors.fleet.actor_factory import ActorClasses
    from solrl_ray.config.loading import load

    launch.train(load([Path(file)]), address=address, live=False, classes=ActorClasses(explorer=Gated))
