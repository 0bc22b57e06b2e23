"""Where a run is found by other processes of its cluster, who need not import what the controller does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress
from solrl_ray.scheduling.lending import Loan

if TYPE_CHECKING:
    from actors.fleet.actor_factory import ActorClasses

NAME = "controller"
"""Of the actor, in the namespace of its run."""


class ControllerActor:
    """The controller as an actor. Ray has whoever asks for an actor import the module of its class: this one is light,
    where that of the controller takes seconds."""

    def __init__(self, config: Config, folder: Path, roles: ActorClasses) -> None:
        self._config = config  # of which Ray asks for the name even where what follows raises
        from actors.controller import Controller

        self._controller = Controller(config, folder, roles)

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        run = self._config.run
        return f"controller of {run.name}, {run.iterations} iterations"

    def run(self) -> None:
        self._controller.run()

    # While that is at work, these answer from other threads.

    def progress(self) -> Progress:
        return self._controller.progress()

    def scale(self, sizes: Mapping[str, int]) -> str:
        return self._controller.scale(sizes)

    def borrow(self, request: str) -> Loan | None:
        """A regenerator for an evaluation from outside, now or at a later call."""
        return self._controller.lender.ask(request)

    def renew(self, request: str) -> None:
        """The evaluation is at work with the regenerator that it has."""
        self._controller.lender.renew(request)

    def give_back(self, request: str) -> None:
        """The evaluation has what it wanted, or gives up."""
        self._controller.lender.done(request)


def namespace(folder: Path) -> str:
    """Ray namespace of the run in `folder`: two runs never share one, even under equal names.

    By whatever way the folder is named: the one who asks how a run is may know it by a link.
    """
    place = folder.resolve()
    return f"solrl-{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
