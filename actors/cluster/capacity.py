"""Whether the cluster has what a run asks for, at once or while nodes join; asks Ray which nodes are being drained."""

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
    """What the run asks for beside what the cluster has now."""
    nodes = [Node(resources=n["Resources"], labels=n.get("Labels") or {}) for n in ray.nodes() if n["Alive"]]
    return placement.fit(placement.requests(config), nodes)


def await_resources(config: Config) -> None:
    """Return once every actor has room; an autoscaler, if there is one, is asked for nodes.

    Raises UserError after `fleet.deadlines.resources`: it names what is missing and which keys to change.
    """
    patience = config.fleet.deadlines.resources
    deadline, said = time.monotonic() + patience, float("-inf")
    asked = False
    try:
        while True:
            fits = survey(config)
            if not any(entry.missing for entry in fits):
                return
            if time.monotonic() >= deadline:
                waited = f", after {patience:g} s of waiting (fleet.deadlines.resources)" if patience else ""
                raise UserError(diagnosis(fits) + waited)
            if not asked:
                _ask_autoscaler([entry.request for entry in fits])
                asked = True
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                print(f"waiting for nodes, {max(0.0, deadline - said):.0f} s left\n{placement.table(fits)}", flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        if asked:
            request_resources(bundles=[])  # from now on the actors' own demand counts; this one would never expire


def draining() -> set[str]:
    """Ids of nodes that are leaving: an autoscaler or ``ray drain-node`` said so, or their Ray got SIGTERM."""
    # Not public: Ray has no other way to ask.
    return set(ray._private.state.state.get_draining_nodes())


def diagnosis(fits: Sequence[Fit]) -> str:
    """One sentence on what is missing."""
    for resource, key in _KEYS.items():
        shares = {entry.request.key: entry.request.total(resource) for entry in fits}
        wanted, there = sum(shares.values()), ray.cluster_resources().get(resource, 0.0)
        if wanted > there:
            asked = ", ".join(f"{name} {share:g}" for name, share in shares.items() if share)
            return (
                f"the actors ask for {wanted:g} {resource}s ({asked}), but the cluster has {there:g}; "
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


def _ask_autoscaler(wanted: Sequence[ResourceRequest]) -> None:
    """Without an autoscaler, this does nothing."""
    actors = [request for request in wanted for _ in range(request.count) if any(request.each.values())]
    request_resources(
        bundles=[{name: amount for name, amount in request.each.items() if amount} for request in actors],
        bundle_label_selectors=[dict(request.labels) for request in actors],
    )
