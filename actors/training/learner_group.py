"""The controller's interface to the learner group. Every call goes to all ranks; if one rank is lost, the whole group
is rebuilt.

::

    last checkpoint ─► start ─► update ─► state ─► checkpoint ─► saved
           ▲                      │         │                   │
           ├──── rebuild ◄────────┴─────────┘   a rank died or hung: new ranks get the same samples again
           └──── leave   ◄──────────────────────────────────────┘   the node of a rank is draining

An update is a deterministic function of state and samples, so a rebuilt group ends with the same bytes. On GPUs that
ranks share with other roles, only lost or hung processes are replaced; in the others a new rank joins the new group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from actors.world import Sent, Tell, World, all_answers
from solrl_ray.config import compiled_learner
from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, RunError, WorkerGone
from solrl_ray.learning.state import LearnerState, PolicyFactors
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.planning.update import passes
from solrl_ray.scheduling.placement import amounts
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publish import RevisionShard, assemble

MOVE_SECONDS = 5.0
"""Seconds to wait for resources on other nodes; after that, the next update runs on the draining node."""


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """References to the inputs of an update."""

    iteration: int
    groups: list[Any]
    embeddings: list[Any]


Factors = Mapping[str, torch.Tensor]

Beginning = Callable[[], Awaitable[LearnerState | None]]
"""Returns the state from which a rebuilt group starts; None for revision 0."""


class LearnerGroup:
    def __init__(
        self,
        config: Config,
        world: World,
        *,
        last_state: Beginning,
        replacements: Replacements,
        tell: Tell,
        supply: Callable[[int], Awaitable[list[Any]]],
    ) -> None:
        """
        Args:
            last_state: returns the state of the newest checkpoint.
            replacements: budget that each rebuild is charged to.
            tell: reports a sentence to the user.
            supply: returns references to an iteration's groups again, if some were lost with a node.
        """
        self._config, self._world = config, world
        self._last_state = last_state
        self._begin_with("the last checkpoint", last_state)
        self._replacements, self._report, self._supply = replacements, tell, supply
        self.packs = True
        """True if revisions need packed weights."""
        self.rebuilt = 0
        """Number of times that the group was rebuilt."""
        self._nodes: frozenset[str] = frozenset()
        """Ids of the ranks' nodes."""
        self._inputs: UpdateInputs | None = None
        """Inputs of the update that no checkpoint contains yet."""
        self._offers: list[Sent] = []
        """Calls of `offer` that were not awaited yet."""
        self._metrics: UpdateMetrics | None = None
        self._passes = passes(config) if compiled_learner.is_compiled(config) else ()
        """Policies whose forward and backward passes the ranks compile."""
        self._warm = False
        """True once they are compiled."""
        self._ranks: list[Any] = []
        self._turn = asyncio.Lock()
        """Held during a call: every call needs all ranks, so calls run one at a time."""

    # Start

    async def spawn(self) -> None:
        """Reserve resources for all ranks together, and create the ranks.

        Raises RunError if the cluster has no room.
        """
        patience = self._config.fleet.deadlines.resources + self._config.fleet.deadlines.start
        if not await self._reserve(patience):
            raise RunError(
                f"{self._describe_ranks()} found no room together within {patience:g} s (fleet.deadlines.resources and "
                ".start); lower learner.world_size, which a resumed run may change, request less per rank, choose "
                "another placement, or use a larger cluster"
            )
        self._ranks = self._spawn_all()

    async def start(self, state: LearnerState | None) -> None:
        """Connect the ranks and load `state` of a checkpoint; None: revision 0."""
        self._begin_with(_describe_checkpoint(state), _returning(state))
        try:
            await self._join(state)
        except WorkerGone as error:
            await self._rebuild(error)

    async def load(self, state: LearnerState) -> None:
        """Load the state of another checkpoint. An unpublished update is discarded."""
        self._inputs = None
        self._begin_with(_describe_checkpoint(state), _returning(state))
        await self._call_group("load", await self._put(state), seconds=self._config.fleet.deadlines.start)

    @property
    def compiles(self) -> bool:
        return bool(self._passes)

    async def warm_up(self, embedding: Any) -> None:
        """Compile the passes before samples arrive. Does nothing if they are compiled; without this call, ranks compile
        before their first update.

        Only for ranks that share no GPU with other roles: compiling needs the memory of an update.

        `embedding`: reference to the embedding of any prompt.
        """
        async with self._turn:
            try:
                await self._compile([embedding])
            except WorkerGone as error:
                await self._rebuild(error)

    # Update

    def offer(
        self, iteration: int, sizes: Sequence[int], first: int, groups: Sequence[Any], embeddings: Sequence[Any]
    ) -> None:
        """Let the ranks start with samples of an incomplete iteration, without waiting.

        Ignored while another call runs, because that call may replace the ranks. `update` brings all samples anyway.

        Args:
            sizes: number of samples of each prompt of the iteration.
            first: position of the first group in prompt order.
            groups, embeddings: references, which the caller must hold until the update.
        """
        if self._turn.locked():
            return
        arguments = iteration, list(sizes), first, list(groups), list(embeddings)
        self._offers += [self._world.send(rank, "offer", *arguments) for rank in self._ranks]

    async def update(self, iteration: int, groups: Sequence[Any], embeddings: Sequence[Any]) -> UpdateMetrics:
        """Run one update; returns the metrics of rank 0. The next call must be `state` or `updated`.

        Args:
            groups: references to the sample groups in prompt order, held here until the state is read.
            embeddings: references to the embeddings of their prompts.
        """
        async with self._turn:
            self._inputs = UpdateInputs(iteration, list(groups), list(embeddings))
            try:
                return await self._learn(self._inputs)
            except WorkerGone as error:
                await self._rebuild(error)
        assert self._metrics is not None
        return self._metrics

    async def state(self) -> LearnerState:
        """The complete state after an update.

        From now on a rebuilt group starts from this state. It does not repeat the update, because on a GPU the result
        might differ from the state that is saved and published.
        """
        state: LearnerState = (await self._call_group("state", seconds=self._config.fleet.deadlines.update))[0]
        self._inputs = None
        self._begin_with("its last state, which no checkpoint holds yet", _returning(state))
        return state

    def saved(self) -> None:
        """The group's state is saved, so a rebuilt group reads `last_state` and the copy in memory is freed."""
        self._begin_with("the last checkpoint", self._last_state)

    async def leave(self, nodes: Collection[str]) -> None:
        """Move all ranks to other nodes if one of them is on these draining nodes and the cluster has room.

        Call after `saved`: the new ranks start from that state. The move is not charged to the replacement budget.
        """
        if not self._nodes & set(nodes):
            return
        async with self._turn:
            if not await self._reserve(MOVE_SECONDS):
                self._report(
                    f"a node of the learner group is leaving, and {self._describe_ranks()} find no room elsewhere yet"
                )
                return
            self._report(
                "a node of the learner group is leaving: the group continues elsewhere, from the last checkpoint"
            )
            for process in map(self._world.process, self._ranks):  # their reservation was replaced
                process.lost = process.counted = True
            self._renew()
            try:
                await self._join(await self._beginning())
            except WorkerGone as error:
                await self._rebuild(error)

    # Called for publishing

    async def revision(self, policy: Policy) -> Revision:
        """The current weights of `policy`, merged and quantised for publication; the ranks share the work."""
        shards = await self._shards(policy)
        seconds = self._config.fleet.deadlines.publish
        present: PolicyFactors = (await self._call_group("factors", policy, seconds=seconds))[0]
        return await self._assembled(shards, present.factors)

    async def updated(self, on_sent: Callable[[], None]) -> tuple[LearnerState, Revision]:
        """The state after an update, and the revision of its sampling policy.

        `on_sent`: called right after the calls were sent to the ranks; calls that it sends to their GPUs run next.
        """
        shards = await self._shards("old", on_sent)
        rebuilt = self.rebuilt
        state = await self.state()
        if self.rebuilt != rebuilt:  # the update was repeated, and on a GPU its bits may differ
            shards = await self._shards("old", on_sent)
        return state, await self._assembled(shards, state.old)

    async def _shards(self, policy: Policy, on_sent: Callable[[], None] = lambda: None) -> list[RevisionShard]:
        seconds = self._config.fleet.deadlines.publish
        return await self._call_group("shard", policy, self.packs, seconds=seconds, on_sent=on_sent)

    async def _assembled(self, shards: list[RevisionShard], factors: Factors) -> Revision:
        what, lora = "assembling the revision", self._config.model.lora
        seconds = self._config.fleet.deadlines.publish
        return await self._world.blocking(lambda: assemble(shards, lora, factors), what, seconds)

    # Internals

    async def _join(self, state: LearnerState | None) -> None:
        seconds = self._config.fleet.deadlines.start
        hosts = await self._call_ranks("start", seconds=seconds)
        self._nodes = frozenset(await self._call_ranks("node", seconds=seconds))
        sent = [self._world.send(self._ranks[0], "address")]
        what = "the address of learner 0"
        ((address, port),) = await all_answers(self._world, sent, what=what, seconds=seconds)
        await self._call_ranks("join", address, port, len(set(hosts)) == 1, seconds=seconds)
        if state is not None:
            await self._call_ranks("load", await self._put(state), seconds=seconds)

    async def _learn(self, inputs: UpdateInputs) -> UpdateMetrics:
        deadlines = self._config.fleet.deadlines
        offers, self._offers = self._offers, []
        what = "offering samples to the learner group"
        await all_answers(self._world, offers, what=what, seconds=deadlines.update)
        try:
            await self._compile(inputs.embeddings)
            await self._feed(inputs)
        except InputGone as error:
            self._report(f"the samples of iteration {inputs.iteration} are taken from the run folder ({error.reason})")
            self._let_others_work()  # so that damaged groups can be made again
            inputs = self._inputs = replace(inputs, groups=await self._supply(inputs.iteration))
            await self._feed(inputs)
        metrics: UpdateMetrics = (await self._call_ranks("update", inputs.iteration, seconds=deadlines.update))[0]
        self._metrics = metrics
        return metrics

    async def _compile(self, embeddings: Sequence[Any]) -> None:
        """Compile the passes of each policy with the first embedding. Reported, as it takes minutes without a cache."""
        if self._warm or not self._passes:
            return
        kinds = f"{', '.join(self._passes[:-1])}{' and ' * (len(self._passes) > 1)}{self._passes[-1]} with gradient"
        kept = f"learner.activation_memory {compiled_learner.activation_memory(self._config):g}"
        shapes = self._config.model.shapes if len(self._config.model.shapes) > 1 else [None]
        per_shape = f", each for {len(shapes)} shapes" if len(shapes) > 1 else ""
        self._report(
            f"the learners compile their passes ({kinds}{per_shape}, {kept}); this takes minutes unless compile.cache "
            "has the kernels"
        )
        seconds = []
        for policy, shape in product(self._passes, shapes):
            deadline = self._config.fleet.deadlines.warm_up
            took = await self._call_ranks("warm_up", policy, embeddings[0], shape, seconds=deadline)
            seconds.append(f"{policy}{f' at {shape}' if shape else ''} in {max(took):.1f} s")
        self._report(f"the learners have compiled {', '.join(seconds)}")
        self._warm = True

    async def _feed(self, inputs: UpdateInputs) -> None:
        # Two fetches, each with twice its deadline, so that their errors come first: these name the missing object.
        seconds = 4 * self._config.fleet.deadlines.fetch
        await self._call_ranks("feed", inputs.iteration, inputs.groups, inputs.embeddings, seconds=seconds)

    async def _rebuild(self, error: WorkerGone) -> None:
        """Start new ranks from the last state or checkpoint, and repeat the update that is not saved yet, if any.

        Raises RunError if no replacement is left.
        """
        try:
            while True:
                await self._find_lost()
                self._charge(error)
                self._report(f"the learner group is rebuilt from {self._origin} ({error})", "lost")
                self._renew()
                for process in map(self._world.process, self._ranks):
                    process.learner_is_idle.clear()
                try:
                    await self._join(await self._beginning())
                    if self._inputs is not None:
                        await self._learn(self._inputs)
                    return
                except WorkerGone as again:
                    error = again
                    self._let_others_work(only_lost=True)
        finally:
            self._let_others_work()

    async def _find_lost(self) -> None:
        """Find lost ranks if none is known: a rank may have died after its answer, so that only its peers noticed."""
        processes = [process for process in map(self._world.process, self._ranks) if process.name]
        if processes and not any(process.lost for process in processes):
            with suppress(WorkerGone):
                await self._call_ranks("node", seconds=self._config.fleet.deadlines.start)

    def _let_others_work(self, *, only_lost: bool = False) -> None:
        """Let the other roles on the ranks' GPUs start and compile."""
        for process in map(self._world.process, self._ranks):
            if process.lost or not only_lost:
                process.learner_is_idle.set()

    def _begin_with(self, origin: str, state: Beginning) -> None:
        """Set the state from which a rebuilt group starts; `origin` names it in messages."""
        self._origin, self._beginning = origin, state

    def _renew(self) -> None:
        for rank in self._ranks:
            process = self._world.process(rank)
            (self._world.dismiss if process.name and not process.lost else self._world.kill)(rank)
        self.rebuilt += 1
        self._offers, self._warm = [], False
        self._ranks = self._spawn_all()

    def _charge(self, error: WorkerGone) -> None:
        """Charge the replacement budget, unless the loss of the same shared process was already charged."""
        lost = [process for process in map(self._world.process, self._ranks) if process.lost and process.name]
        if not any(process.counted for process in lost):
            self._replacements.spend("the learner group", str(error))
        for process in lost:
            process.counted = True

    async def _reserve(self, seconds: float) -> bool:
        what = f"reserving resources for {self._describe_ranks()}"
        return await self._world.blocking(
            lambda: self._world.reserve_learner_bundles(seconds), what, 2 * seconds + MOVE_SECONDS
        )

    async def _put(self, state: LearnerState) -> Any:
        seconds = self._config.fleet.deadlines.start
        return await self._world.blocking(lambda: self._world.put(state), "sharing the learners' state", seconds)

    def _describe_ranks(self) -> str:
        learners, ranks = self._config.fleet.learners, self._config.learner.world_size
        per_rank = amounts({"GPU": learners.num_gpus, "CPU": learners.num_cpus})
        return f"{ranks} learner ranks ({per_rank} each, fleet.learners.placement {learners.placement})"

    def _spawn_all(self) -> list[Any]:
        return [self._world.learner(rank, self.rebuilt) for rank in range(self._config.learner.world_size)]

    async def _call_group(
        self, method: str, *arguments: Any, seconds: float, on_sent: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """`_call_ranks`, which rebuilds the group and calls again if a rank is lost."""
        async with self._turn:
            while True:
                try:
                    return await self._call_ranks(method, *arguments, seconds=seconds, on_sent=on_sent)
                except WorkerGone as error:
                    await self._rebuild(error)

    async def _call_ranks(
        self, method: str, *arguments: Any, seconds: float, on_sent: Callable[[], None] = lambda: None
    ) -> list[Any]:
        calls = [self._world.send(rank, method, *arguments) for rank in self._ranks]
        on_sent()
        what = f"{method} of the learner group"
        return await all_answers(self._world, calls, what=what, seconds=seconds, on_loss=self._abort)

    def _abort(self) -> None:
        """Make the ranks leave collectives in which they wait for a lost rank."""
        for rank in self._ranks:
            self._world.abort(rank)


def _returning(state: LearnerState | None) -> Beginning:
    async def given() -> LearnerState | None:
        return state

    return given


def _describe_checkpoint(state: LearnerState | None) -> str:
    return "revision 0" if state is None else f"the checkpoint after {state.updates} updates"
