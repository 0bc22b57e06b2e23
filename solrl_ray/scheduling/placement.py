"""The actors of a run against the nodes of a cluster. Pure.

Actors are placed one by one, in the order in which a run makes them and the largest first, on the first node that
matches their labels and has room. If that works, Ray can place them too. A share of a GPU comes from one card, as with
Ray: from the fullest one that has room. Label selectors are Ray's: ``value``, ``!value``, ``in(a,b)``, ``!in(a,b)``.
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
"""Ten times 0.1 must equal 1."""


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
    """Labels of nodes to use, in this order, if none with `labels` has room."""
    placement: str = "PACK"
    """Ray's strategy; only STRICT_PACK and STRICT_SPREAD change which nodes have room."""
    turn: int = 0
    """Lower turns take places first."""

    def total(self, resource: str) -> float:
        return self.count * self.each.get(resource, 0.0)

    def preferred(self, nodes: Sequence[Node]) -> list[int]:
        """The nodes that it may use, the first choice first."""
        selectors = (self.labels, *self.fallbacks)
        found = [n for labels in selectors for n, node in enumerate(nodes) if matches(node.labels, labels)]
        return list(dict.fromkeys(found))

    @property
    def where(self) -> str:
        """``role=explorer, else any``."""
        return ", else ".join(
            ", ".join(f"{key}={value}" for key, value in labels.items()) or "any"
            for labels in (self.labels, *self.fallbacks)
        )

    def describe(self) -> str:
        """What each of them asks for: ``1 GPU each``, ``0.5 GPU each, of one card``."""
        where = {"STRICT_PACK": "all on one node", "STRICT_SPREAD": "each on another node"}.get(self.placement)
        card = ", of one card" if 0 < self.each.get("GPU", 0.0) < 1 else ""
        place = f", {where}: {self.key}.placement {self.placement}" if where else ""
        return f"{amounts(self.each)} each{card}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    request: ResourceRequest
    placed: int
    present: Mapping[str, float]
    """Total of all nodes that it may use."""
    nodes: int
    """Number of these nodes."""

    @property
    def missing(self) -> int:
        """Actors for which no node has room."""
        return self.request.count - self.placed


def ranks_first(config: Config) -> bool:
    """Whether learner ranks take their places before the pools do.

    In `colocated` placement most others are roles of their processes. Otherwise the pools come first: ranks without
    labels could take the only nodes with the pools' labels.
    """
    return is_colocated(config.fleet)


def requests(config: Config) -> list[ResourceRequest]:
    """A run's requests, one a process; the controller and its helpers ask for nothing."""
    fleet, learners, others = config.fleet, config.fleet.learners, apart(config)

    def request(key: str, worker: WorkerResources, count: int) -> ResourceRequest:
        return ResourceRequest(
            key=key,
            count=count,
            each={"GPU": worker.num_gpus, "CPU": worker.num_cpus},
            labels=worker.selectors[0],
            fallbacks=worker.selectors[1:],
        )

    asked = {name: request(f"fleet.{name}", pool, pool.count) for name, pool in others.items()}
    if REGENERATORS in asked:
        # If both pools share cards, what is left for one depends on which came first.
        later = int(shares(fleet.explorers) and shares(fleet.regenerators))
        asked[REGENERATORS] = replace(asked[REGENERATORS], turn=later)
    encoding = fleet.encoders
    if not encodes_on_cards(fleet) and (encoding.num_gpus or encoding.num_cpus):
        asked["encoders"] = request("fleet.encoders", encoding, encoding.count)
    ranks = request("fleet.learners", learners, config.learner.world_size)
    turn = -1 if ranks_first(config) else 2
    return [*asked.values(), replace(ranks, placement=learners.placement, turn=turn)]


def fit(wanted: Sequence[ResourceRequest], nodes: Sequence[Node]) -> list[Fit]:
    """Place the requests; the result is in the order of `wanted`."""
    free = [_FreeResources.of(node) for node in nodes]
    placed: dict[str, int] = {}
    for request in sorted(wanted, key=lambda r: (r.turn, [-r.each.get(name, 0.0) for name in RESOURCES])):
        placed[request.key] = _place_all(request, [free[node] for node in request.preferred(nodes)])
    found = []
    for request in wanted:
        alike = [nodes[node] for node in request.preferred(nodes)]
        present = {name: sum(node.resources.get(name, 0.0) for node in alike) for name in RESOURCES}
        found.append(Fit(request=request, placed=placed[request.key], present=present, nodes=len(alike)))
    return found


@dataclass(slots=True)
class _FreeResources:
    cpus: float
    cards: list[float]
    """Of each GPU."""

    @classmethod
    def of(cls, node: Node) -> _FreeResources:
        return cls(cpus=node.resources.get("CPU", 0.0), cards=[1.0] * int(node.resources.get("GPU", 0.0)))

    def acquire(self, each: Mapping[str, float]) -> bool:
        """Take what an actor asks for, or nothing if there is not enough."""
        cpus, gpus = each.get("CPU", 0.0), each.get("GPU", 0.0)
        share = min(gpus, 1.0)
        fitting = [card for card, left in enumerate(self.cards) if left + _ROUNDING >= share]
        fitting.sort(key=self.cards.__getitem__)
        wanted = math.ceil(gpus)
        if self.cpus + _ROUNDING < cpus or len(fitting) < wanted:
            return False
        self.cpus -= cpus
        for card in fitting[:wanted]:
            self.cards[card] -= share
        return True


def _place_all(request: ResourceRequest, rooms: Sequence[_FreeResources]) -> int:
    """How many of them have room, which they take."""
    if request.placement == "STRICT_SPREAD":
        fitting = [room for room in rooms if deepcopy(room).acquire(request.each)]
        return sum(room.acquire(request.each) for room in fitting[: request.count])
    if request.placement == "STRICT_PACK":
        most = [sum(left.acquire(request.each) for _ in range(request.count)) for left in deepcopy(list(rooms))]
        rooms = [rooms[most.index(max(most))]] if rooms else []
    return sum(any(room.acquire(request.each) for room in rooms) for _ in range(request.count))


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with `labels` meets every condition of `selector`."""
    return all(_holds(labels.get(key), condition) for key, condition in selector.items())


def _holds(value: str | None, condition: str) -> bool:
    negated, condition = condition.startswith("!"), condition.removeprefix("!")
    if condition.startswith("in(") and condition.endswith(")"):
        allowed = [part.strip() for part in condition[3:-1].split(",")]
    else:
        allowed = [condition]
    return (value in allowed) != negated


def table(fits: Sequence[Fit]) -> str:
    """Wanted, present and missing, one line a kind of actors."""
    rows = [("", "actors", "each", "labels", "nodes", "present", "missing")]
    for entry in fits:
        request = entry.request
        wanted = request.key, str(request.count), amounts(request.each), request.where
        rows.append((*wanted, str(entry.nodes), amounts(entry.present), str(entry.missing or "none")))
    return plain_table(rows)


def amounts(resources: Mapping[str, float]) -> str:
    """``1 GPU, 2 CPU``; ``nothing`` if all are 0."""
    return ", ".join(f"{value:g} {name}" for name, value in resources.items() if value) or "nothing"
