"""Asking a live run how it is, and for workers more or less, from another process of its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray._private import services

from actors.client.connect import joined
from actors.cluster import wait
from actors.cluster.names import CONTROLLER, namespace
from solrl_ray.errors import Late, RunError, UserError, WorkerGone
from solrl_ray.metrics.records import Progress

ANSWER_SECONDS = 30.0


def clusters_here() -> list[str]:
    """Addresses of the Ray clusters that have a node on this machine, or of the one that this process is in."""
    if ray.is_initialized():
        return [ray.get_runtime_context().gcs_address]
    services.find_gcs_addresses.cache_clear()
    return sorted(services.find_gcs_addresses())


def live_progress(run: Path | None, *, clusters: Sequence[str]) -> Progress | None:
    """A snapshot of the run in folder `run`, or of the only one on these clusters; None if it is not running there.

    Raises UserError if no run was named and there are several, RunError if it does not answer, and as `connect.join`.
    """
    with _asking(run, clusters) as controller:
        if controller is None:
            return None
        try:
            asked = controller.progress.remote()
            return cast(Progress, wait.get(asked, what="the controller's progress", seconds=ANSWER_SECONDS))
        except Late as error:
            raise RunError(f"{error}: it is starting, or its machine is very busy; ask again") from None
        except WorkerGone:  # it ended between being found and being asked
            return None


def scale(run: Path | None, sizes: Mapping[str, int], *, clusters: Sequence[str]) -> str:
    """Have a live run's pools of other sizes; what will happen, in a sentence a pool. See `Fleet.scale`.

    Raises UserError for sizes out of bounds, if that run is not live on these clusters, or several are and none was
    named, and as `connect.join`.
    """
    with _asking(run, clusters) as controller:
        if controller is None:
            there = f"on the cluster at {' or '.join(clusters)}" if clusters else "on a cluster of this machine"
            what = f"The run in {run} is not live" if run else f"No run is live {there}"
            raise UserError(f"{what}; name the folder of a live run, or with --address its cluster.")
        asked = controller.scale.remote(sizes)
        return str(wait.get(asked, what="the controller's answer", seconds=ANSWER_SECONDS))


@contextmanager
def _asking(run: Path | None, clusters: Sequence[str]) -> Iterator[Any | None]:
    """As `controller_of`, on the one of these clusters that has such a run, of which this process is a driver then."""
    if len(clusters) > 1:
        clusters = [address for address, runs in {each: _runs_on(run, each) for each in clusters}.items() if runs]
    if len(clusters) > 1:
        raise UserError(f"runs are live on {len(clusters)} clusters ({', '.join(clusters)}); name the folder of one.")
    if not clusters:
        yield None
        return
    with joined(clusters[0]):
        yield controller_of(run)


def _runs_on(run: Path | None, address: str) -> list[str]:
    """Those on one cluster of several; none on one that cannot be joined, which may be another user's."""
    try:
        with joined(address):
            return _spaces(run)
    except RunError:
        return []


def controller_of(run: Path | None) -> Any | None:
    """The controller of the run in folder `run`, or of the only one on the cluster; None if it is not running there.

    Raises UserError if no run was named, and the cluster has several.
    """
    spaces = _spaces(run)
    if len(spaces) > 1:
        raise UserError(f"{len(spaces)} runs are live ({', '.join(spaces)}); name the folder of one.")
    if not spaces:
        return None
    try:
        return ray.get_actor(CONTROLLER, namespace=spaces[0])
    except ValueError:  # it has ended since
        return None


def _spaces(run: Path | None) -> list[str]:
    """Namespaces of the runs on the cluster that this process is in; `run`: of this one alone."""
    spaces = sorted(
        found["namespace"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"] == CONTROLLER and found["namespace"].startswith("solrl-")
    )
    return spaces if run is None else [space for space in spaces if space == namespace(run)]
