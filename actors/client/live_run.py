"""Asking a live run how it is, and for workers more or less, from another process of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import ray

from actors.client.connect import joined
from actors.cluster import wait
from actors.cluster.names import CONTROLLER, namespace
from solrl_ray.errors import UserError, WorkerGone
from solrl_ray.metrics.records import Progress

ANSWER_SECONDS = 30.0


def live_progress(run: Path | None, *, address: str) -> Progress | None:
    """A snapshot of the run in folder `run`, or of the only one on the cluster; None if it is not running there.

    Raises UserError if no run was named, and the cluster has several, and as `connect.join`.
    """
    with joined(address):
        controller = controller_of(run)
        if controller is None:
            return None
        try:
            asked = controller.progress.remote()
            return cast(Progress, wait.get(asked, what="the controller's progress", seconds=ANSWER_SECONDS))
        except WorkerGone:  # it ended between being found and being asked
            return None


def scale(run: Path | None, sizes: Mapping[str, int], *, address: str) -> str:
    """Have a live run's pools of other sizes; what will happen, in a sentence a pool. See `Fleet.scale`.

    Raises UserError for sizes out of bounds, if no run of that name is live at `address`, or several are and none was
    named, and as `connect.join`.
    """
    with joined(address):
        controller = controller_of(run)
        if controller is None:
            raise UserError(f"{run or 'No run'} is not live on the cluster at {address}; name a run that is.")
        asked = controller.scale.remote(sizes)
        return str(wait.get(asked, what="the controller's answer", seconds=ANSWER_SECONDS))


def controller_of(run: Path | None) -> Any | None:
    """The controller of the run in folder `run`, or of the only one on the cluster; None if it is not running there.

    Raises UserError if no run was named, and the cluster has several.
    """
    spaces = sorted(
        found["namespace"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"] == CONTROLLER and found["namespace"].startswith("solrl-")
    )
    if run is not None:
        spaces = [space for space in spaces if space == namespace(run)]
    elif len(spaces) > 1:
        raise UserError(f"{len(spaces)} runs are live ({', '.join(spaces)}); name the folder of one.")
    if not spaces:
        return None
    try:
        return ray.get_actor(CONTROLLER, namespace=spaces[0])
    except ValueError:  # it has ended since
        return None
