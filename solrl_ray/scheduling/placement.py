"""Checks whether the actors of a run fit on the nodes of a cluster. Pure.

Actors are placed one by one, in the order in which a run creates them, the largest first. Each goes to the first node
with matching labels and enough free resources. If this succeeds, Ray can place them too. A fraction of a GPU comes from
one GPU, as in Ray: the fullest one that still has enough. Label selectors are Ray's: ``value``, ``!value``,
``in(a,b)``, ``!in(a,b)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from solrl_ray.common.output import plain_table
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.pools import REGENERATORS, apart, encodes_on_cards, is_colocated, shares
from solrl_ray.config.schema import Config

RESOURCES = ("GPU", "CPU")
_ROUNDING = 1e-9
"""Tolerance of sums: ten times 0.1 must equal 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node with its total resources, not its free ones."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    key: str
    """Its key in the configuration: ``fleet.explorers``."""
    count: int
    each: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Sequence[Mapping[str, str]] = ()
    """Labels of nodes to use instead, in this order, if no node with `labels` has free resources."""
    placement: str = "PACK"
    """Ray's strategy; only STRICT_PACK and STRICT_SPREAD change which nodes fit."""
    turn: int = 0
    """Placement order; lower turns are placed first."""

    def total(self, resource: str) -> float:
        return self.count * self.each.get(resource, 0.0)

    def preferred(self, nodes: Sequence[Node]) -> list[int]:
        """Positions of the nodes it may use, in the order of preference."""
        selectors = (self.labels, *self.fallbacks)
        usable = [n for labels in selectors for n, node in enumerate(nodes) if matches(node.labels, labels)]
        return list(dict.fromkeys(usable))

    @property
    def where(self) -> str:
        """``role=explorer, else any``."""
        return ", else ".join(
            ", ".join(f"{key}={value}" for key, value in labels.items()) or "any"
            for labels in (self.labels, *self.fallbacks)
        )

    def describe(self) -> str:
        """The resources of each actor: ``1 GPU each``, ``0.5 GPU each, of one GPU``."""
        where = {"STRICT_PACK": "all on one node", "STRICT_SPREAD": "each on a different node"}.get(self.placement)
        single = ", of one GPU" if 0 < self.each.get("GPU", 0.0) < 1 else ""
        strategy = f", {where}: {self.key}.placement {self.placement}" if where else ""
        return f"{amounts(self.each)} each{single}{strategy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    request: ResourceRequest
    placed: int
    present: Mapping[str, float]
    """Total resources of all nodes that `request` may use."""
    nodes: int
    """Number of nodes that `request` may use."""

    @property
    def missing(self) -> int:
        """Number of actors that fit on no node."""
        return self.request.count - self.placed


def ranks_first(config: Config) -> bool:
    """Whether learner ranks are placed before the pools.

    In `colocated` placement they are, because most workers run inside the ranks' processes. Otherwise the pools come
    first: ranks without labels could take the only nodes with the pools' labels.
    """
    return is_colocated(config.fleet)


def requests(config: Config) -> list[ResourceRequest]:
    """A run's requests: one per pool, one for the learner ranks. The controller and its helpers need no resources."""
    fleet, learners, others = config.fleet, config.fleet.learners, apart(config)

    def request(key: str, worker: WorkerResources, count: int) -> ResourceRequest:
        return ResourceRequest(
            key=key,
            count=count,
            each={"GPU": worker.num_gpus, "CPU": worker.num_cpus},
            labels=worker.selectors[0],
            fallbacks=worker.selectors[1:],
        )

    wanted = {name: request(f"fleet.{name}", pool, pool.count) for name, pool in others.items()}
    if REGENERATORS in wanted:
        # If both pools use fractions of GPUs, the resources left for the second depend on which comes first.
        later = int(shares(fleet.explorers) and shares(fleet.regenerators))
        wanted[REGENERATORS] = replace(wanted[REGENERATORS], turn=later)
    encoding = fleet.encoders
    if not encodes_on_cards(fleet) and (encoding.num_gpus or encoding.num_cpus):
        wanted["encoders"] = request("fleet.encoders", encoding, encoding.count)
    ranks = request("fleet.learners", learners, config.learner.world_size)
    turn = -1 if ranks_first(config) else 2
    return [*wanted.values(), replace(ranks, placement=learners.placement, turn=turn)]


def fit(wanted: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[Fit]:
    """Place the requests; the result is in the order of `wanted`."""
    free = [_FreeResources.of(node) for node in nodes]
    placed: dict[str, int] = {}
    for request in sorted(wanted, key=lambda r: (r.turn, [-r.each.get(name, 0.0) for name in RESOURCES])):
        placed[request.key] = _place_all(request, [free[node] for node in request.preferred(nodes)])
    fits = []
    for request in wanted:
        usable = [nodes[node] for node in request.preferred(nodes)]
        present = {name: sum(node.resources.get(name, 0.0) for node in usable) for name in RESOURCES}
        fits.append(Fit(request=request, placed=placed[request.key], present=present, nodes=len(usable)))
    return fits


@dataclass(slots=True)
class _FreeResources:
    cpus: float
    gpus: list[float]
    """Free fraction of each GPU."""

    @classmethod
    def of(cls, node: Node) -> _FreeResources:
        return cls(cpus=node.resources.get("CPU", 0.0), gpus=[1.0] * int(node.resources.get("GPU", 0.0)))

    def acquire(self, each: Mapping[str, float]) -> bool:
        """Take the resources of one actor and return True; if they do not suffice, take nothing and return False."""
        cpus, gpus = each.get("CPU", 0.0), each.get("GPU", 0.0)
        share = min(gpus, 1.0)
        fitting = [gpu for gpu, free in enumerate(self.gpus) if free + _ROUNDING >= share]
        fitting.sort(key=self.gpus.__getitem__)
        wanted = math.ceil(gpus)
        if self.cpus + _ROUNDING < cpus or len(fitting) < wanted:
            return False
        self.cpus -= cpus
        for gpu in fitting[:wanted]:
            self.gpus[gpu] -= share
        return True


def _place_all(request: ResourceRequest, nodes: Sequence[_FreeResources]) -> int:
    """Take the resources of as many of the request's actors as fit; returns their number."""
    if request.placement == "STRICT_SPREAD":
        fitting = [node for node in nodes if deepcopy(node).acquire(request.each)]
        return sum(node.acquire(request.each) for node in fitting[: request.count])
    if request.placement == "STRICT_PACK":
        most = [sum(free.acquire(request.each) for _ in range(request.count)) for free in deepcopy(list(nodes))]
        nodes = [nodes[most.index(max(most))]] if nodes else []
    return sum(any(node.acquire(request.each) for node in nodes) for _ in range(request.count))


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with `labels` meets every condition of `selector`."""
    return all(_meets(labels.get(key), condition) for key, condition in selector.items())


def _meets(value: str | None, condition: str) -> bool:
    negated, condition = condition.startswith("!"), condition.removeprefix("!")
    if condition.startswith("in(") and condition.endswith(")"):
        allowed = [part.strip() for part in condition[3:-1].split(",")]
    else:
        allowed = [condition]
    return (value in allowed) != negated


def table(fits: Sequence[Fit]) -> str:
    """Wanted, present and missing resources, one line per kind of actor."""
    rows = [("", "actors", "each", "labels", "nodes", "present", "missing")]
    for entry in fits:
        request = entry.request
        wanted = request.key, str(request.count), amounts(request.each), request.where
        rows.append((*wanted, str(entry.nodes), amounts(entry.present), str(entry.missing or "none")))
    return plain_table(rows)


def amounts(resources: Mapping[str, float]) -> str:
    """``1 GPU, 2 CPU``; ``nothing`` if all are 0."""
    return ", ".join(f"{value:g} {name}" for name, value in resources.items() if value) or "nothing"
