"""``solrl status`` and ``solrl pool scale``: query a live run for its progress, or resize its pools, from another
process connected to its cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from actors.client.connect import joined
from actors.cluster import wait
from actors.cluster.names import CONTROLLER, namespace
from solrl_ray.common.checked_json import as_record
from solrl_ray.errors import Late, RunError, UserError, WorkerGone
from solrl_ray.metrics.records import EVENTS_SHOWN, Progress

ANSWER_SECONDS = 30.0


def live_progress(run: Path | None, *, clusters: Sequence[str]) -> Progress | None:
    """Progress of the run in folder `run`, or, if that is None, of the only run on these clusters. None if it is not
    running on them.

    Raises UserError if `run` is None and several runs are live, RunError if the run does not answer, and as
    `connect.join`.
    """
    with _asking(run, clusters) as controller:
        if controller is None:
            return None
        try:
            request = controller.progress.remote(-EVENTS_SHOWN)
            return checked(wait.get(request, what="the controller's progress", seconds=ANSWER_SECONDS))
        except Late as error:
            raise RunError(f"{error}: the run is starting, or its machine is very busy; try again") from None
        except WorkerGone:  # the run ended after its controller was found
            return None


def checked(answer: Any) -> Progress:
    """Check the answer of a controller, which may run another version. Raises RunError if it is no valid Progress."""
    try:
        return as_record(Progress, asdict(answer), "the answer of the run's controller")
    except (TypeError, AttributeError, UserError) as error:
        raise RunError(
            f"the run's controller answered with a {type(answer).__name__} that this version does not understand "
            f"({error}); use the version that the run uses"
        ) from error


def scale(run: Path | None, sizes: Mapping[str, int], *, clusters: Sequence[str]) -> str:
    """Resize the pools of a live run; returns one sentence per pool on the effect. See `Fleet.scale`.

    Raises UserError if sizes are out of bounds, if the run is not live on these clusters, or if `run` is None and
    several runs are live; and as `connect.join`.
    """
    with _asking(run, clusters) as controller:
        if controller is None:
            where = f"on the cluster at {' or '.join(clusters)}" if clusters else "on a cluster of this machine"
            what = f"The run in {run} is not live" if run else f"No run is live {where}"
            raise UserError(f"{what}; name the folder of a live run, or with --address its cluster.")
        request = controller.scale.remote(sizes)
        return str(wait.get(request, what="the controller's answer", seconds=ANSWER_SECONDS))


@contextmanager
def _asking(run: Path | None, clusters: Sequence[str]) -> Iterator[Any | None]:
    """Context that yields `controller_of` on the cluster with this run, None without one. Meanwhile this process is a
    driver of the cluster.

    Raises UserError if runs are live on several clusters.
    """
    if len(clusters) > 1:
        live = {each: names for each in clusters if (names := _runs_on(run, each))}
        clusters = list(live)
        if len(live) > 1:
            where = "; ".join(f"{address}: {', '.join(names)}" for address, names in live.items())
            raise UserError(f"runs are live on {len(live)} clusters ({where}); name the folder of one.")
    if not clusters:
        yield None
        return
    with joined(clusters[0]):
        yield controller_of(run)


def _runs_on(run: Path | None, address: str) -> list[str]:
    """Namespaces of the runs on a cluster; empty if it cannot be joined, because it may belong to another user."""
    try:
        with joined(address):
            return _spaces(run)
    except RunError:
        return []


def controller_of(run: Path | None) -> Any | None:
    """The controller of the run in folder `run`, or, if that is None, of the only run on the cluster. None if it is not
    running on it.

    Raises UserError if `run` is None and several runs are live.
    """
    spaces = _spaces(run)
    if len(spaces) > 1:
        raise UserError(f"{len(spaces)} runs are live ({', '.join(spaces)}); name the folder of one.")
    if not spaces:
        return None
    try:
        return ray.get_actor(CONTROLLER, namespace=spaces[0])
    except ValueError:  # the run has ended meanwhile
        return None


def _spaces(run: Path | None) -> list[str]:
    """Namespaces of all runs on this process's cluster; if `run` is given, at most the one of this run."""
    spaces = sorted(
        actor["namespace"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"] == CONTROLLER and actor["namespace"].startswith("solrl-")
    )
    return spaces if run is None else [space for space in spaces if space == namespace(run)]
