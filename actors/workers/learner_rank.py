"""A rank of the learner group: the actor that runs `solrl_ray.learning.learner.Learner`."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray
import torch

from actors.cluster import wait
from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from actors.workers.devices import prepare
from solrl_ray import models
from solrl_ray.common.deadlines import in_thread
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.schema import Config
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import InputGone, RunError, WorkerGone
from solrl_ray.gpu.shared_model import SharedModel
from solrl_ray.learning.collectives import Collectives
from solrl_ray.learning.engine import free_port, leave_process_group, process_group
from solrl_ray.learning.learner import Learner
from solrl_ray.learning.state import LearnerState, PolicyFactors
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.models import attention
from solrl_ray.models.components import Component
from solrl_ray.planning.update import passes
from solrl_ray.policy import adapters
from solrl_ray.records import PromptEmbedding, SampleGroup, SampleShape
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.publish import Publisher, RevisionShard


class LearnerRank(Callee):
    def __init__(self, config: Config, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._learner: Learner | None = None
        self._collectives: Collectives | None = None
        """Collectives of the group that this rank has joined or is joining."""
        self._storing: Future[Any] | None = None
        self._buffers: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """Host memory that is reused in each iteration."""
        self._shared: SharedModel | None = None
        """The model that all roles on this GPU share; None if this rank does not share its process."""

    def _title(self) -> str:
        return f"learner-{self._rank} of {self._config.learner.world_size}"

    def share(self, model: SharedModel) -> None:
        """Use the model that all roles on this GPU share. Call before `start`."""
        self._shared = model

    def leave(self) -> None:
        """End this role; the other roles on the GPU stay."""
        if self._shared is not None:
            self._shared.factors = None
        try:
            if self._collectives is not None:
                self._collectives.close()
            if self._learner is not None:
                self._learner.close()
        finally:
            if self._collectives is not None:
                leave_process_group()

    def abort(self) -> None:
        """Abort the collective in which this rank waits for a lost one. Call it from another thread."""
        if self._collectives is not None:
            self._collectives.abort()

    @noted
    def start(self) -> str:
        """Build the model; returns the host name. The constructor does not do it: see `SamplingWorker`."""
        self._device = prepare(self._config.fleet.learners, deterministic=self._config.run.deterministic)
        model = self._config.model
        components: set[Component] = {"transformer"}
        if self._shared is None:
            self._model = models.load(model, self._device, components=components)
        else:
            self._model = self._shared.load(self._device, components)
        with progress_note("preparing the publication of weights"):
            tier = self._tier_of_explorers()
            self._publisher = Publisher.for_model(self._model.transformer, self._config, tier=tier)
        return socket.gethostname()

    def address(self) -> tuple[str, int]:
        """This node's IP address and a free port, where rank 0 hosts the process group."""
        return ray.util.get_node_ip_address(), free_port()

    @noted
    def join(self, address: str, port: int, one_host: bool) -> None:
        """Join the process group and build the learner at revision 0. Returns when all ranks have joined.

        `one_host`: True if all ranks are on the same host.
        """
        world_size, deadlines = self._config.learner.world_size, self._config.fleet.deadlines
        self._collectives = Collectives(self._rank, self._device)
        joining = f"joining the learner group at {address} (learner.world_size {world_size})"
        with progress_note(joining), self._collectives.watched():
            process_group(
                self._rank,
                world_size,
                address,
                port,
                device=self._device,
                timeout=deadlines.collective,
                one_host=one_host,
                network=self._config.fleet.network,
            )
        with progress_note("building its adapters and optimizer"), self._collectives.watched():
            self._learner = Learner(self._config, self._model, self._rank, world_size, self._collectives.check)
        if self._shared is not None:
            self._shared.kernels["learner"] = attention.kernels()
            self._shared.factors = partial(self._learner.factors, on_host=False)

    @noted
    def load(self, state: LearnerState) -> None:
        learner = self._joined
        with progress_note(f"loading the state after {state.updates} updates"), self._watched():
            learner.load(state)
        self._storing = None  # the stored state is outdated

    @noted
    def warm_up(self, policy: adapters.Active, embedding: PromptEmbedding, shape: SampleShape | None) -> float:
        """Compile the passes of one policy for one sample shape; returns seconds. Not collective.

        A separate call for each, so that the progress is visible.
        """
        kinds, of_shape = passes(self._config), f" at {shape}" if shape else ""
        with progress_note(f"compiling {kinds.index(policy) + 1} of {len(kinds)}, the passes of {policy}{of_shape}"):
            self._bring_weights_to_gpu()
            return self._joined.warm_up(policy, embedding, shape)

    def offer(self, iteration: int, sizes: list[int], first: int, groups: list[Any], embeddings: list[Any]) -> None:
        """Take the next sample groups of an incomplete iteration, passed by reference. Not collective.

        If a fetch fails, these and all later groups are skipped: `feed` brings them.

        Args:
            sizes: number of samples of each prompt of the iteration.
            first: position of the first group in prompt order.
        """
        self._bring_weights_to_gpu()
        self._joined.begin(iteration, sizes)
        if first != self._joined.taken:
            return
        with contextlib.suppress(InputGone):
            self._joined.add_groups(*self._fetch(iteration, groups, embeddings))

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        """Take all sample groups and embeddings of an iteration, as references in prompt order. Groups taken by `offer`
        are not fetched again. Not collective.

        Raises InputGone: some are lost, or do not arrive in time.
        """
        self._bring_weights_to_gpu()
        missing = slice(self._joined.taken, None)
        fetched, by_prompt = self._fetch(iteration, groups[missing], embeddings[missing])
        if not missing.start:
            self._joined.begin(iteration, [len(group.indices) for group in fetched])
        self._joined.add_groups(fetched, by_prompt)

    def _fetch(
        self, iteration: int, groups: list[Any], embeddings: list[Any]
    ) -> tuple[list[SampleGroup], dict[str, PromptEmbedding]]:
        seconds = self._config.fleet.deadlines.fetch
        what = f"fetching the samples of iteration {iteration}"
        try:
            fetched: list[SampleGroup] = wait.get(groups, what=what, seconds=seconds)
            fetched_embeddings = wait.get(embeddings, what=what, seconds=seconds)
        except WorkerGone as error:  # this rank works; only its input is lost
            raise InputGone(error.what, error.reason) from error
        return fetched, {embedding.prompt_id: embedding for embedding in fetched_embeddings}

    def update(self, iteration: int) -> UpdateMetrics:
        """Run the update of the iteration passed to `feed`, and free its samples. Collective.

        On rank 0, a thread then puts the new state into the object store.
        """
        self._bring_weights_to_gpu()
        learner = self._joined
        with self._watched():
            metrics = learner.finish(iteration)
            state = learner.state(self._buffers)
        if self._rank == 0:
            self._storing = in_thread(lambda: self._put(state), "storing the learner's state")
        return metrics

    def state(self) -> Any:
        """Reference to the complete state after the last update; None except on rank 0."""
        if self._storing is None:
            return None
        storing, self._storing = self._storing, None
        return storing.result(self._config.fleet.deadlines.update)

    def _put(self, state: LearnerState) -> Any:
        return ray.put(state)

    def _tier_of_explorers(self) -> str:
        return pool_sampling(self._config).tier

    def shard(self, policy: Policy, pack: bool = True) -> RevisionShard:
        """This rank's shard of a policy, merged and, for explorers, quantised; if `pack`, with the packed weights."""
        self._bring_weights_to_gpu()
        return self._publisher.shard(
            self._joined.revision,
            self._joined.factors(policy, on_host=False),
            policy=policy,
            rank=self._rank,
            world_size=self._config.learner.world_size,
            pack=pack,
            buffers=self._buffers["packed"],
        )

    def factors(self, policy: Policy) -> PolicyFactors | None:
        """LoRA factors of a policy, from rank 0; None from other ranks."""
        return None if self._rank else PolicyFactors(self._joined.factors(policy))

    def _watched(self) -> AbstractContextManager[None]:
        """Context for code with collectives; the rank must have joined (`Collectives.watched`)."""
        assert self._collectives is not None
        return self._collectives.watched()

    def _bring_weights_to_gpu(self) -> None:
        """On a shared GPU: restore the base weights for learning. The shared model may hold a merged policy."""
        if self._shared is not None:
            self._shared.bring_weights_for("learner")
            torch.set_num_threads(self._config.fleet.learners.threads)

    @property
    def _joined(self) -> Learner:
        if self._learner is None:
            raise RunError(f"learner rank {self._rank} was used before it joined its group")
        return self._learner
