"""The learner group: one actor a rank around `solrl_ray.learning.Learner`, called once an iteration."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors import waiting
from actors.devices import prepare
from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.engine import free_port, process_group
from solrl_ray.learning.learner import Learner, UpdateMetrics
from solrl_ray.learning.state import LearnerState
from solrl_ray.revisions.manifest import Policy
from solrl_ray.revisions.payload import Revision
from solrl_ray.revisions.publish import Part, Publisher, assemble


class LearnerRank:
    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._learner: Learner | None = None

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        return f"learner-{self._rank} of {self._config.learner.world_size}"

    def start(self) -> str:
        """Build the model; returns this node's name. Not in the constructor: see `Explorer.start`."""
        self._device = prepare(self._config.fleet.learners)
        model = self._config.model
        self._model = models.load(model, self._device, components={"transformer"})
        self._publisher = Publisher.for_model(self._model.transformer, self._config)
        return socket.gethostname()

    def address(self) -> tuple[str, int]:
        """Where rank 0 can be met: this node's IP and a free port."""
        return ray.util.get_node_ip_address(), free_port()

    def join(self, address: str, port: int, one_host: bool) -> None:
        """Join the process group and build the learner at revision 0. Returns when all ranks have."""
        world_size = self._config.learner.world_size
        process_group(
            self._rank,
            world_size,
            address,
            port,
            device=self._device,
            timeout=self._config.fleet.deadlines.collective,
            one_host=one_host,
            network=self._config.fleet.network,
        )
        self._learner = Learner(self._config, self._model, self._rank, world_size)

    def load(self, state: LearnerState) -> None:
        self._joined.load(state)

    def update(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> UpdateMetrics:
        """One update on sample groups in prompt order; groups and embeddings come by reference."""
        seconds = self._config.fleet.deadlines.fetch
        what = f"fetching the samples of iteration {iteration}"
        fetched = waiting.get(groups, what=what, seconds=seconds)
        prompts = {e.prompt_id: e for e in waiting.get(embeddings, what=what, seconds=seconds)}
        return self._joined.update(iteration, fetched, prompts)

    def state(self) -> LearnerState | None:
        """The whole state, from rank 0; collective."""
        state = self._joined.state()
        return state if self._rank == 0 else None

    def part(self, policy: Policy) -> Part:
        """This rank's share of the policy as it is now, merged and quantised."""
        return self._publisher.part(
            self._joined.revision,
            self._joined.factors(policy),
            policy=policy,
            rank=self._rank,
            world_size=self._config.learner.world_size,
        )

    def factors(self, policy: Policy) -> dict[str, Any]:
        """A policy's LoRA factors by name, float32 on the CPU."""
        return self._joined.factors(policy)

    @property
    def _joined(self) -> Learner:
        if self._learner is None:
            raise RunError(f"learner rank {self._rank} was used before it joined its group")
        return self._learner


class LearnerGroup:
    """The controller's side of the group: calls every rank, waits for all, loses all if one is lost."""

    def __init__(self, spawn: Callable[[int], Any], config: Config) -> None:
        self._config = config
        self._ranks = [spawn(rank) for rank in range(config.learner.world_size)]

    def start(self, state: LearnerState | None) -> None:
        """Bring the ranks together, at `state` or at revision 0."""
        seconds = self._config.fleet.deadlines.start
        hosts = self._all("start", seconds=seconds)
        address, port = waiting.get(self._ranks[0].address.remote(), what="the address of learner 0", seconds=seconds)
        self._all("join", address, port, len(set(hosts)) == 1, seconds=seconds)
        if state is not None:
            self._all("load", ray.put(state), seconds=seconds)

    def update(self, iteration: int, groups: Sequence[Any], embeddings: Sequence[Any]) -> UpdateMetrics:
        """One update; returns rank 0's metrics."""
        results = self._all(
            "update", iteration, list(groups), list(embeddings), seconds=self._config.fleet.deadlines.update
        )
        metrics: UpdateMetrics = results[0]
        return metrics

    def state(self) -> LearnerState:
        state: LearnerState = self._all("state", seconds=self._config.fleet.deadlines.update)[0]
        return state

    def revision(self, policy: Policy) -> Revision:
        """The policy as it is now, ready to be published; the ranks share the work."""
        parts = self._all("part", policy, seconds=self._config.fleet.deadlines.publish)
        return assemble(parts, self._config.model.lora)

    def factors(self, policy: Policy) -> dict[str, Any]:
        """LoRA factors by name; they are the same on all ranks."""
        seconds = self._config.fleet.deadlines.publish
        what = f"the factors of policy {policy}"
        factors: dict[str, Any] = waiting.get(self._ranks[0].factors.remote(policy), what=what, seconds=seconds)
        return factors

    def _all(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        refs = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        results: list[Any] = waiting.get(refs, what=f"{method} of the learner group", seconds=seconds)
        return results
