"""A run whose controller a test asks and keeps, as `actors.client.launch` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from actors.client.controller_actor import ControllerActor
from actors.client.launch import located
from actors.cluster.names import CONTROLLER, namespace
from actors.fleet.actor_factory import ActorClasses, on_this_node
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import Progress
from solrl_ray.storage.run_folder import RunFolder
from tests.support.patience import SECONDS, patience, wait_until


def begun(config: Config, classes: ActorClasses | None = None) -> tuple[Any, Any]:
    """(its controller, the reference of what the run comes to) of a new run; kill the controller in the end."""
    run = RunFolder.of(config)
    run.create(config, resume=False)
    run.lock.release()
    made: Any = on_this_node(ControllerActor, CONTROLLER, namespace(run.path))
    handle = made.remote(located(config), run.path, classes or ActorClasses())
    return handle, handle.run.remote()


def progress(controller: Any) -> Progress:
    found: Progress = ray.get(controller.progress.remote(), timeout=patience())
    return found


def wait_for(what: str, controller: Any, reached: Callable[[Progress], bool], seconds: float = SECONDS) -> Progress:
    """The first snapshot of progress of which that is so."""
    seen: list[Progress] = []

    def told() -> bool:
        seen[:] = [progress(controller)]
        return reached(seen[0])

    wait_until(what, told, seconds)
    return seen[0]
