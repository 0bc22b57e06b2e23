"""The learner group, seen from the controller: every call goes to all ranks, and the loss of one rebuilds all.

::

    last checkpoint ─► start ─► update ─► state ─► checkpoint ─► saved
           ▲                      │         │                   │
           ├──── rebuild ◄────────┴─────────┘   a rank died or hung: new ranks, fed the same samples again
           └──── leave   ◄──────────────────────────────────────┘   the node of a rank is leaving

An update is a function of state and samples, so a rebuilt group arrives at the same bytes. On cards, whose processes
have other roles as well, only those that are lost or hang are replaced; in the others a new rank joins the new group.
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
"""Seconds to look for room elsewhere before the next update begins on a node that is leaving."""


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """What an update learns from, by reference."""

    iteration: int
    groups: list[Any]
    embeddings: list[Any]


Factors = Mapping[str, torch.Tensor]

Beginning = Callable[[], Awaitable[LearnerState | None]]
"""Gives the state from which a rebuilt group starts; None for revision 0."""


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
            last_state: the newest checkpoint.
            replacements: the budget that pays for each rebuilding.
            tell: is given a sentence for the user.
            supply: an iteration's groups once more, by reference, if some are lost with a node.
        """
        self._config, self._world = config, world
        self._last_state = last_state
        self._begin_with("the last checkpoint", last_state)
        self._replacements, self._tell, self._supply = replacements, tell, supply
        self.packs = True
        """Whether revisions need packed weights."""
        self.rebuilt = 0
        """How often the group was rebuilt."""
        self._nodes: frozenset[str] = frozenset()
        """Ids of the ranks' nodes."""
        self._inputs: UpdateInputs | None = None
        """Of the update that no checkpoint holds yet."""
        self._offers: list[Sent] = []
        """Calls that offered samples to the ranks, not yet awaited."""
        self._metrics: UpdateMetrics | None = None
        self._passes = passes(config) if compiled_learner.is_compiled(config) else ()
        """Kinds of passes that the ranks compile."""
        self._warm = False
        """Whether they are compiled."""
        self._ranks: list[Any] = []
        self._turn = asyncio.Lock()
        """Every call needs all ranks, so calls run one at a time."""

    # Start

    async def spawn(self) -> None:
        """Reserve places for all ranks together, and make them.

        Raises RunError if there is no room.
        """
        patience = self._config.fleet.deadlines.resources + self._config.fleet.deadlines.start
        if not await self._seat(patience):
            raise RunError(
                f"{self._wanted()} found no room together within {patience:g} s (fleet.deadlines.resources and "
                ".start); ask for less, as a resumed run may with learner.world_size, or another placement, or use a "
                "larger cluster"
            )
        self._ranks = self._spawn_all()

    async def start(self, state: LearnerState | None) -> None:
        """Connect the ranks, at `state` of a checkpoint or at revision 0."""
        self._begin_with(_checkpoint(state), _fixed(state))
        try:
            await self._join(state)
        except WorkerGone as error:
            await self._rebuild(error)

    async def load(self, state: LearnerState) -> None:
        """Go to the state of another checkpoint; an update that is not published is forgotten."""
        self._inputs = None
        self._begin_with(_checkpoint(state), _fixed(state))
        await self._all("load", await self._put(state), seconds=self._config.fleet.deadlines.start)

    @property
    def compiles(self) -> bool:
        return bool(self._passes)

    async def warm_up(self, embedding: Any) -> None:
        """Compile before samples come, unless it is done; otherwise ranks compile before their first update. Only for
        ranks that share no GPU: a pass takes an update's memory.

        `embedding`: reference of any prompt's embedding.
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

        Ignored while another call runs, because its ranks may be new: `update` brings all samples.

        Args:
            sizes: samples of each of the iteration's prompts.
            first: position of the first group in prompt order.
            groups, embeddings: references, which the caller keeps until the update.
        """
        if self._turn.locked():
            return
        arguments = iteration, list(sizes), first, list(groups), list(embeddings)
        self._offers += [self._world.send(rank, "offer", *arguments) for rank in self._ranks]

    async def update(self, iteration: int, groups: Sequence[Any], embeddings: Sequence[Any]) -> UpdateMetrics:
        """One update; returns rank 0's metrics. `state` must follow.

        Args:
            groups: references of the sample groups, in prompt order; kept until `saved`.
            embeddings: references of their prompts' embeddings.
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
        """The whole state after an update. From now on a rebuilt group starts from it: on a GPU, a repeated update
        might differ from what is saved and published.
        """
        state: LearnerState = (await self._all("state", seconds=self._config.fleet.deadlines.update))[0]
        self._inputs = None
        self._begin_with("its last state, which no checkpoint holds yet", _fixed(state))
        return state

    def saved(self) -> None:
        """Note that `last_state` is the group's state, so that it need not be kept in memory."""
        self._begin_with("the last checkpoint", self._last_state)

    async def leave(self, nodes: Collection[str]) -> None:
        """If a rank is on one of these nodes, which are leaving, move all ranks elsewhere, if there is room.

        Call after `saved`: new ranks start from that state. It costs no replacement.
        """
        if not self._nodes & set(nodes):
            return
        async with self._turn:
            if not await self._seat(MOVE_SECONDS):
                self._tell(f"a node of the learner group is leaving, and {self._wanted()} find no room elsewhere yet")
                return
            self._tell(
                "a node of the learner group is leaving: the group continues elsewhere, from the last checkpoint"
            )
            for process in map(self._world.process, self._ranks):  # they have lost their places
                process.lost = process.counted = True
            self._renew()
            try:
                await self._join(await self._beginning())
            except WorkerGone as error:
                await self._rebuild(error)

    # Called for publishing

    async def revision(self, policy: Policy) -> Revision:
        """The present policy, ready to be published; the ranks share the work."""
        shards = await self._shards(policy)
        seconds = self._config.fleet.deadlines.publish
        found: PolicyFactors = (await self._all("factors", policy, seconds=seconds))[0]
        return await self._assembled(shards, found.factors)

    async def updated(self, asked: Callable[[], None]) -> tuple[LearnerState, Revision]:
        """The state after an update, and the revision of its sampling policy.

        `asked`: called when the ranks have been asked: what it sends to their cards is done next.
        """
        shards = await self._shards("old", asked)
        rebuilt = self.rebuilt
        state = await self.state()
        if self.rebuilt != rebuilt:  # the update was repeated, on a GPU perhaps with other bits
            shards = await self._shards("old", asked)
        return state, await self._assembled(shards, state.old)

    async def _shards(self, policy: Policy, asked: Callable[[], None] = lambda: None) -> list[RevisionShard]:
        seconds = self._config.fleet.deadlines.publish
        return await self._all("shard", policy, self.packs, seconds=seconds, asked=asked)

    async def _assembled(self, shards: list[RevisionShard], factors: Factors) -> Revision:
        what, lora = "putting the revision together", self._config.model.lora
        seconds = self._config.fleet.deadlines.publish
        return await self._world.blocking(lambda: assemble(shards, lora, factors), what, seconds)

    # Internals

    async def _join(self, state: LearnerState | None) -> None:
        seconds = self._config.fleet.deadlines.start
        hosts = await self._ask("start", seconds=seconds)
        self._nodes = frozenset(await self._ask("node", seconds=seconds))
        sent = [self._world.send(self._ranks[0], "address")]
        what = "the address of learner 0"
        ((address, port),) = await all_answers(self._world, sent, what=what, seconds=seconds)
        await self._ask("join", address, port, len(set(hosts)) == 1, seconds=seconds)
        if state is not None:
            await self._ask("load", await self._put(state), seconds=seconds)

    async def _learn(self, inputs: UpdateInputs) -> UpdateMetrics:
        deadlines = self._config.fleet.deadlines
        offers, self._offers = self._offers, []
        what = "what was offered to the learner group"
        await all_answers(self._world, offers, what=what, seconds=deadlines.update)
        try:
            await self._compile(inputs.embeddings)
            await self._feed(inputs)
        except InputGone as error:
            self._tell(f"the samples of iteration {inputs.iteration} are taken from the run folder ({error.reason})")
            self._let_others_work()  # damaged groups are made again
            inputs = self._inputs = replace(inputs, groups=await self._supply(inputs.iteration))
            await self._feed(inputs)
        metrics: UpdateMetrics = (await self._ask("update", inputs.iteration, seconds=deadlines.update))[0]
        self._metrics = metrics
        return metrics

    async def _compile(self, embeddings: Sequence[Any]) -> None:
        """Compile each kind of passes with the first embedding. Say so: it takes minutes without a cache."""
        if self._warm or not self._passes:
            return
        kinds = f"{', '.join(self._passes[:-1])}{' and ' * (len(self._passes) > 1)}{self._passes[-1]} with gradient"
        kept = f"learner.activation_memory {compiled_learner.activation_memory(self._config):g}"
        shapes = self._config.model.shapes if len(self._config.model.shapes) > 1 else [None]
        each = f", each for {len(shapes)} shapes" if len(shapes) > 1 else ""
        self._tell(f"the learners compile their passes ({kinds}{each}, {kept}): minutes, unless compile.cache has them")
        seconds = []
        for policy, shape in product(self._passes, shapes):
            deadline = self._config.fleet.deadlines.warm_up
            took = await self._ask("warm_up", policy, embeddings[0], shape, seconds=deadline)
            seconds.append(f"{policy}{f' at {shape}' if shape else ''} in {max(took):.1f} s")
        self._tell(f"the learners have compiled {', '.join(seconds)}")
        self._warm = True

    async def _feed(self, inputs: UpdateInputs) -> None:
        # Twice the deadline of each of its two fetches, whose errors name what is missing.
        seconds = 4 * self._config.fleet.deadlines.fetch
        await self._ask("feed", inputs.iteration, inputs.groups, inputs.embeddings, seconds=seconds)

    async def _rebuild(self, error: WorkerGone) -> None:
        """Start new ranks from the stored or last state, and repeat the open update.

        Raises RunError if no replacement is left.
        """
        try:
            while True:
                await self._find_lost()
                self._count(error)
                self._tell(f"the learner group is rebuilt from {self._origin} ({error})", "lost")
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
        """If none is known to be lost, find out: a rank may die after its answer, and only its peers have noticed."""
        processes = [process for process in map(self._world.process, self._ranks) if process.name]
        if processes and not any(process.lost for process in processes):
            with suppress(WorkerGone):
                await self._ask("node", seconds=self._config.fleet.deadlines.start)

    def _let_others_work(self, *, only_lost: bool = False) -> None:
        """Let other roles of the ranks' cards start and compile."""
        for process in map(self._world.process, self._ranks):
            if process.lost or not only_lost:
                process.learner_is_idle.set()

    def _begin_with(self, origin: str, state: Beginning) -> None:
        """Set the state from which a rebuilt group starts; `origin` names it for the user."""
        self._origin, self._beginning = origin, state

    def _renew(self) -> None:
        for rank in self._ranks:
            process = self._world.process(rank)
            (self._world.dismiss if process.name and not process.lost else self._world.kill)(rank)
        self.rebuilt += 1
        self._offers, self._warm = [], False
        self._ranks = self._spawn_all()

    def _count(self, error: WorkerGone) -> None:
        """Use up a replacement, unless the loss of the same card was counted already."""
        lost = [process for process in map(self._world.process, self._ranks) if process.lost and process.name]
        if not any(process.counted for process in lost):
            self._replacements.spend("the learner group", str(error))
        for process in lost:
            process.counted = True

    async def _seat(self, seconds: float) -> bool:
        what = f"the search for places of {self._wanted()}"
        return await self._world.blocking(
            lambda: self._world.reserve_learner_bundles(seconds), what, 2 * seconds + MOVE_SECONDS
        )

    async def _put(self, state: LearnerState) -> Any:
        seconds = self._config.fleet.deadlines.start
        return await self._world.blocking(lambda: self._world.put(state), "sharing the learners' state", seconds)

    def _wanted(self) -> str:
        learners, ranks = self._config.fleet.learners, self._config.learner.world_size
        each = amounts({"GPU": learners.num_gpus, "CPU": learners.num_cpus})
        return f"{ranks} learner ranks ({each} each, fleet.learners.placement {learners.placement})"

    def _spawn_all(self) -> list[Any]:
        return [self._world.learner(rank, self.rebuilt) for rank in range(self._config.learner.world_size)]

    async def _all(
        self, method: str, *arguments: Any, seconds: float, asked: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """As `_ask`, for a group that is rebuilt if it is lost."""
        async with self._turn:
            while True:
                try:
                    return await self._ask(method, *arguments, seconds=seconds, asked=asked)
                except WorkerGone as error:
                    await self._rebuild(error)

    async def _ask(
        self, method: str, *arguments: Any, seconds: float, asked: Callable[[], None] = lambda: None
    ) -> list[Any]:
        calls = [self._world.send(rank, method, *arguments) for rank in self._ranks]
        asked()
        what = f"{method} of the learner group"
        return await all_answers(self._world, calls, what=what, seconds=seconds, on_loss=self._abort)

    def _abort(self) -> None:
        """Have the ranks leave collectives in which they wait for one that is lost."""
        for rank in self._ranks:
            self._world.abort(rank)


def _fixed(state: LearnerState | None) -> Beginning:
    async def given() -> LearnerState | None:
        return state

    return given


def _checkpoint(state: LearnerState | None) -> str:
    return "revision 0" if state is None else f"the checkpoint after {state.updates} updates"
