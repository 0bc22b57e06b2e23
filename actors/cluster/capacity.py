"""Checks that the cluster has the resources of a run, waits for nodes that join, and lists draining nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.autoscaler.sdk import request_resources

from solrl_ray.config.schema import Config
from solrl_ray.errors import UserError
from solrl_ray.scheduling import placement
from solrl_ray.scheduling.placement import Fit, Node, ResourceRequest

POLL_SECONDS = 1.0
PROGRESS_SECONDS = 10.0
_KEYS = {"GPU": "num_gpus", "CPU": "num_cpus"}


def survey(config: Config) -> list[Fit]:
    """Compares the resources that a run requests with those that the cluster has now."""
    nodes = [Node(resources=n["Resources"], labels=n.get("Labels") or {}) for n in ray.nodes() if n["Alive"]]
    return placement.fit(placement.requests(config), nodes)


def await_resources(config: Config) -> None:
    """Return once the cluster has room for every actor. Requests nodes from the autoscaler, if the cluster has one.

    Raises UserError after `fleet.deadlines.resources`; the message names the missing resources and the keys to change.
    """
    patience = config.fleet.deadlines.resources
    deadline, reported = time.monotonic() + patience, float("-inf")
    requested = False
    try:
        while True:
            fits = survey(config)
            if not any(entry.missing for entry in fits):
                return
            if time.monotonic() >= deadline:
                waited = f", after {patience:g} s of waiting (fleet.deadlines.resources)" if patience else ""
                raise UserError(diagnosis(fits) + waited)
            if not requested:
                _request_nodes([entry.request for entry in fits])
                requested = True
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                left = max(0.0, deadline - reported)
                print(f"waiting for nodes, {left:.0f} s left\n{placement.table(fits)}", flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        if requested:
            request_resources(bundles=[])  # this request would never expire; the actors themselves now create demand


def draining() -> set[str]:
    """Ids of draining nodes: by an autoscaler, by ``ray drain-node``, or because their Ray process got SIGTERM."""
    # Not public: Ray has no public function for it.
    return set(ray._private.state.state.get_draining_nodes())


def diagnosis(fits: Sequence[Fit]) -> str:
    """One sentence that names the missing resources."""
    for resource, key in _KEYS.items():
        requested = {entry.request.key: entry.request.total(resource) for entry in fits}
        wanted, available = sum(requested.values()), ray.cluster_resources().get(resource, 0.0)
        if wanted > available:
            listing = ", ".join(f"{name} {amount:g}" for name, amount in requested.items() if amount)
            return (
                f"the actors ask for {wanted:g} {resource}s ({listing}), but the cluster has {available:g}; "
                f"lower their count or {key}, or use a larger cluster"
            )
    lacking = [
        f"{entry.missing} of {entry.request.count} actors of {entry.request.key} "
        f"({entry.request.describe()}) have no room on "
        + (f"the {entry.nodes} node{'s' if entry.nodes > 1 else ''}" if entry.nodes else "any node, for none")
        + (f" with {entry.request.where}" if entry.request.labels else "")
        for entry in fits
        if entry.missing
    ]
    return f"{'; '.join(lacking)}; change their count, resources or labels, or use a larger cluster"


def _request_nodes(wanted: Sequence[ResourceRequest]) -> None:
    """Request nodes from the autoscaler; does nothing without one."""
    actors = [request for request in wanted for _ in range(request.count) if any(request.each.values())]
    request_resources(
        bundles=[{name: amount for name, amount in request.each.items() if amount} for request in actors],
        bundle_label_selectors=[dict(request.labels) for request in actors],
    )
