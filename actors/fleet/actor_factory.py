"""Creates actors: the class of each role, its resources and node labels, and the placement group of the learners.

Tests and benchmarks substitute other classes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.cluster.names import CONTROLLER, namespace
from actors.workers.card import GpuProcess
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Regenerator
from actors.workers.selector import Selector
from actors.workers.text_encoder import TextEncoder
from actors.world import Process
from solrl_ray.common.deadlines import in_time
from solrl_ray.config.fleet import WorkerResources
from solrl_ray.config.pools import encodes_here, encodes_on_cards, is_colocated, is_on_a_card, pools
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.scheduling.worker_state import pool_of, slot_of

RELEASE_SECONDS = 30.0
"""Seconds that Ray may take to release the placement groups of the learners."""


@dataclass(frozen=True, slots=True)
class ActorClasses:
    """The class of each role. These are plain classes, made into Ray actors when they are created."""

    text_encoder: type = TextEncoder
    explorer: type = Explorer
    regenerator: type = Regenerator
    learner: type = LearnerRank
    selector: type = Selector


@dataclass(frozen=True, slots=True)
class Actor:
    handle: Any
    role: str
    """Role, shown in process titles and in Ray's task lists."""
    name: str = ""
    """Name among the roles that share a GPU; empty if it is alone in its process."""
    process: Process = field(default_factory=Process)


class ActorFactory:
    """Creates the actors of a run, with readable names and explicit resources. Ray's retries and restarts are off.

    Names are unique within the run's namespace. Actors that read or write the run folder are placed on this node.
    """

    def __init__(
        self, config: Config, folder: Path, classes: ActorClasses, *, scope: str = "", controller: str = CONTROLLER
    ) -> None:
        """
        Args:
            scope: the namespace; default: that of the run.
            controller: name of the actor in this namespace that receives the progress notes of the others.
        """
        self._config = config
        self._folder = folder
        self._classes = classes
        self._namespace = scope or namespace(folder)
        self._controller = controller
        self._seats: PlacementGroup | None = None
        self._cards: dict[int, tuple[Any, Process]] = {}
        """GPU number → handle and process of its shared process."""
        self._made_cards = 0

    def text_encoder(self, name: str) -> Actor:
        worker, role = self._config.fleet.encoders, self._classes.text_encoder
        if encodes_on_cards(self._config.fleet):
            return self._on_card(name, "text_encoder", role, self._config)
        make = (
            self._on_this_node(role, name)
            if encodes_here(self._config.fleet)
            else self._on_any_node(role, name, worker)
        )
        return self._actor(name, make.remote(self._config), "text_encoder")

    def selector(self, name: str) -> Actor:
        make = self._on_this_node(self._classes.selector, name)
        return Actor(make.remote(self._folder, self._config.fleet.strict), "selector")

    def explorer(self, name: str) -> Actor:
        return self._sampling_worker(name, "explorer", self._classes.explorer)

    def regenerator(self, name: str) -> Actor:
        return self._sampling_worker(name, "regenerator", self._classes.regenerator)

    def _sampling_worker(self, name: str, role: str, made: type) -> Actor:
        pool, config = pool_of(name), self._config
        if is_on_a_card(config, pool, slot_of(name)):
            return self._on_card(name, role, made, name, config)
        make = self._on_any_node(made, name, pools(config.fleet)[pool])
        return self._actor(name, make.remote(name, config), role)

    def learner(self, rank: int, rebuilt: int = 0) -> Actor:
        """A learner rank, on its bundle of `reserve_learner_bundles` if one is reserved.

        `rebuilt`: how often the group was rebuilt; becomes part of the name.
        """
        name, made = f"learner-{rank}" + (f".{rebuilt}" if rebuilt else ""), self._classes.learner
        if is_colocated(self._config.fleet):
            return self._on_card(name, "learner", made, self._config, rank)
        make = self._seated(made, name, rank)
        return self._actor(name, make.remote(self._config, rank), "learner")

    def dismiss(self, actor: Actor) -> None:
        """End an actor. If other roles share its process, only this role ends; otherwise the process is killed."""
        process = actor.process
        if actor.name in process.roles:
            process.roles.remove(actor.name)
        if process.roles and not process.lost:
            actor.handle.dismiss.remote(actor.name)
        else:
            process.lost = True
            ray.kill(actor.handle, no_restart=True)

    def _on_card(self, name: str, role: str, made: type, *arguments: Any) -> Actor:
        """A role on the shared GPU whose number is the role's slot. Creates the process if none is live."""
        number = slot_of(name)
        if number not in self._cards or self._cards[number][1].lost:
            process = Process(f"card-{number}" + (f".{self._made_cards}" if number in self._cards else ""))
            handle = self._seated(GpuProcess, process.name, number).remote(process.name, self._config)
            self._cards[number] = self._actor(process.name, handle, "card").handle, process
            self._made_cards += 1
        handle, process = self._cards[number]
        handle.host.options(name=f"{role}.host").remote(name, made, *arguments)
        process.roles.append(name)
        return Actor(handle, role, name, process)

    def _seated(self, role: type, name: str, rank: int) -> Any:
        """An actor with the resources of a learner rank, on that rank's bundle."""
        seat: dict[str, Any] = {}
        if self._seats is not None:
            strategy = PlacementGroupSchedulingStrategy(self._seats, placement_group_bundle_index=rank)
            seat = {"scheduling_strategy": strategy, "label_selector": None}  # its bundle has the labels
        return self._on_any_node(role, name, self._config.fleet.learners, **seat)

    def reserve_learner_bundles(self, seconds: float) -> bool:
        """Reserve resources for all ranks at once, with strategy `fleet.learners.placement`.

        Returns True if they were available within `seconds`: they replace the previous reservation. Otherwise the
        previous one is kept.
        """
        learners, ranks = self._config.fleet.learners, self._config.learner.world_size
        # One byte of memory, because a bundle must not be empty: ranks may request neither CPUs nor GPUs.
        requested = {"CPU": learners.num_cpus, "GPU": learners.num_gpus, "memory": 1}
        bundle = {name: amount for name, amount in requested.items() if amount}
        seats = placement_group(
            [bundle] * ranks,
            strategy=learners.placement,
            name=f"{self._namespace}/learners-{secrets.token_hex(4)}",
            bundle_label_selector=[dict(learners.labels)] * ranks,
        )
        reserved = seats.wait(seconds)
        released = self._seats if reserved else seats
        if reserved:
            self._seats = seats
        if released is not None:
            remove_placement_group(released)
        return reserved

    def _actor(self, name: str, handle: Any, role: str) -> Actor:
        """Wrap the handle of a new actor. Its first call, not awaited, sets the receiver of its progress notes."""
        if hasattr(handle, "send_notes"):  # classes of tests may be plain actors
            handle.send_notes.options(name=f"{role}.send_notes").remote(name, self._controller, self._namespace)
        return Actor(handle, role)

    def _on_this_node(self, role: type, name: str) -> Any:
        return on_this_node(role, name, self._namespace)

    def _on_any_node(self, role: type, name: str, worker: WorkerResources, **options: Any) -> Any:
        needs = {"num_cpus": worker.num_cpus, "num_gpus": worker.num_gpus}
        return _make_actor(role, name, self._namespace, **(needs | where(worker) | options))


def release_placement_groups(namespace: str) -> None:
    """Release the learners' placement groups of a run that has ended: Ray does so only when the driver ends too."""
    what = f"releasing the placement groups of {namespace}"
    try:
        in_time(lambda: _release_placement_groups(namespace), what=what, seconds=RELEASE_SECONDS, silent="Ray")
    except RayError:  # the cluster is gone; the caller has already reported that
        pass
    except RunError as error:
        print(f"note: {error}")


def _release_placement_groups(namespace: str) -> None:
    for key, reserved in placement_group_table().items():
        if reserved["name"].startswith(f"{namespace}/") and reserved["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(key))))


def where(worker: WorkerResources) -> dict[str, Any]:
    """Ray's options for the node labels of a worker."""
    labels, *others = map(dict, worker.selectors)
    return {"label_selector": labels, "fallback_strategy": [{"label_selector": other} for other in others] or None}


def on_this_node(role: type, name: str, namespace: str) -> Any:
    """An actor that reserves no resources and runs on this process's node, which has the run folder."""
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _make_actor(role, name, namespace, num_cpus=0, num_gpus=0, scheduling_strategy=this_node)


def _make_actor(role: type, name: str, namespace: str, **options: Any) -> Any:
    groups = getattr(role, "CONCURRENCY_GROUPS", None)
    make: Any = ray.remote(concurrency_groups=groups)(role) if groups else ray.remote(role)
    return make.options(name=name, namespace=namespace, max_restarts=0, max_task_retries=0, **options)
