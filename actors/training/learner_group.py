"""The learner group, the controller's side: every rank is called, all are waited for, and all are rebuilt for one.

::

    last checkpoint ─► start ─► update ─► state ─► checkpoint ─► saved
           ▲                      │         │                   │
           ├──── rebuild ◄────────┴─────────┘   a rank died or hung: new ranks, fed the same samples again
           └──── leave   ◄──────────────────────────────────────┘   the node of a rank is about to go

An update is a function of state and samples, so a rebuilt group arrives at the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.cluster import capacity, wait
from actors.fleet.budget import Budget
from solrl_ray.config.schema import Config
from solrl_ray.config.sharing import takes_turns
from solrl_ray.config.strategies import pool_sampling
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.scheduling.placement import amounts
from solrl_ray.weight_sync.manifest import Policy
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publish import assemble

MOVE_SECONDS = 5.0
"""How long room elsewhere is looked for before the next update begins on a node that is about to go."""


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """What an update learns from, by reference."""

    iteration: int
    groups: list[Any]
    embeddings: list[Any]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """An update, and the state that it leads to."""

    update: UpdateMetrics
    state: LearnerState
    ended: float
    """When the update was done, by the monotonic clock."""


class LearnerGroup:
    def __init__(
        self,
        spawn: Callable[[int, int], Any],
        config: Config,
        *,
        seat: Callable[[float], bool],
        last_state: Callable[[], LearnerState | None],
        budget: Budget,
        tell: Callable[[str], None],
        supply: Callable[[], list[Any]],
    ) -> None:
        """
        Args:
            spawn: makes the actor of a rank; its second argument counts how often the group was rebuilt.
            seat: reserves places for new ranks, which ends those before; whether there was room within so many seconds.
            last_state: what a rebuilt group begins with, None for revision 0: the newest checkpoint.
            budget: from which each rebuilding takes one.
            tell: is given a sentence for the user.
            supply: the open iteration's groups once more, by reference, if some are lost with a node.
        """
        self._config = config
        self._spawn = spawn
        self._last_state = last_state
        self._begin_with("the last checkpoint", last_state)
        self._budget = budget
        self._tell = tell
        self._supply = supply
        self.tier = pool_sampling(config).tier
        """Of the explorers that the next revision is for."""
        self._rebuilt = 0
        self._nodes: frozenset[str] = frozenset()
        """Ids of those that the ranks are on."""
        self._meal: UpdateInputs | None = None
        """Of the update that no checkpoint holds yet."""
        self._offers: list[Any] = []
        """Answers of the ranks to what they were offered, which nobody has waited for."""
        self._metrics: UpdateMetrics | None = None
        self._seat = seat
        patience = config.fleet.deadlines.resources + config.fleet.deadlines.start
        if not seat(patience):
            raise RunError(
                f"{self._wanted()} found no room together within {patience:g} s (fleet.deadlines.resources and "
                ".start); ask for less, as a resumed run may with learner.world_size, or another placement, or use a "
                "larger cluster"
            )
        self._ranks = self._spawn_all()

    def start(self, state: LearnerState | None) -> None:
        """Bring the ranks together, at `state` of a checkpoint or at revision 0."""
        self._begin_with(_checkpoint(state), lambda: state)
        try:
            self._join(state)
        except wait.WorkerGone as error:
            self._rebuild(error)

    def _join(self, state: LearnerState | None) -> None:
        seconds = self._config.fleet.deadlines.start
        hosts = self._ask("start", seconds=seconds)
        self._nodes = frozenset(self._ask("__ray_call__", capacity.node_of, seconds=seconds))
        address, port = wait.get(self._ranks[0].address.remote(), what="the address of learner 0", seconds=seconds)
        self._ask("join", address, port, len(set(hosts)) == 1, seconds=seconds)
        if state is not None:
            self._ask("load", ray.put(state), seconds=seconds)

    def load(self, state: LearnerState) -> None:
        """Go to the state of another checkpoint."""
        self._begin_with(_checkpoint(state), lambda: state)
        self._all("load", ray.put(state), seconds=self._config.fleet.deadlines.start)

    def offer(
        self, iteration: int, sizes: Sequence[int], first: int, groups: Sequence[Any], embeddings: Sequence[Any]
    ) -> None:
        """Let the ranks begin with samples of an iteration that is not complete; returns at once.

        Args:
            sizes: samples of each of the iteration's prompts.
            first: position of the first group in prompt order.
            groups, embeddings: references, which the caller keeps until the update.
        """
        arguments = iteration, list(sizes), first, list(groups), list(embeddings)
        self._offers += [rank.offer.remote(*arguments) for rank in self._ranks]

    def learn(self, iteration: int, groups: Sequence[Any], embeddings: Sequence[Any]) -> UpdateResult:
        """`update`, then `state`. Raises RunError if that is not finite."""
        update = self.update(iteration, groups, embeddings)
        ended = time.monotonic()
        state = self.state()
        state.check_finite()
        return UpdateResult(update, state, ended)

    def update(self, iteration: int, groups: Sequence[Any], embeddings: Sequence[Any]) -> UpdateMetrics:
        """One update; returns rank 0's metrics.

        Args:
            groups: references of the sample groups, in prompt order; kept until `saved`.
            embeddings: references of their prompts' embeddings.
        """
        self._meal = UpdateInputs(iteration, list(groups), list(embeddings))
        try:
            return self._learn(self._meal)
        except wait.WorkerGone as error:
            self._rebuild(error)
        assert self._metrics is not None
        return self._metrics

    def state(self) -> LearnerState:
        """The whole state after an update. A group that is rebuilt from now on begins with it: done again, the update
        might differ on a GPU from what is saved and from what was published."""
        state: LearnerState = self._all("state", seconds=self._config.fleet.deadlines.update)[0]
        self._meal = None
        self._begin_with("its last state, which no checkpoint holds yet", lambda: state)
        return state

    def saved(self) -> None:
        """Note that `last_state` is what the group holds now, which need not be kept in memory."""
        self._begin_with("the last checkpoint", self._last_state)

    def leave(self, nodes: Collection[str]) -> None:
        """If a rank is on one of these nodes, which are about to go, go elsewhere with all of them, if there is room.

        To be called when `saved` was: new ranks begin with that state. No replacement is spent.
        """
        if not self._nodes & set(nodes):
            return
        if not self._seat(MOVE_SECONDS):
            self._tell(f"a node of the learner group is about to go, and {self._wanted()} find no room elsewhere yet")
            return
        self._tell("a node of the learner group is about to go: it goes on elsewhere, from the last checkpoint")
        self._renew()
        try:
            self._join(self._beginning())
            self._rest()
        except wait.WorkerGone as error:
            self._rebuild(error)

    def revision(self, policy: Policy) -> Revision:
        """The policy as it is now, ready to be published; the ranks share the work."""
        parts = self._all("part", policy, self.tier, seconds=self._config.fleet.deadlines.publish)
        self._rest()
        return assemble(parts, self._config.model.lora)

    def factors(self, policy: Policy) -> dict[str, Any]:
        """LoRA factors by name; they are the same on all ranks."""
        factors: dict[str, Any] = self._all("factors", policy, seconds=self._config.fleet.deadlines.publish)[0]
        return factors

    def _rest(self) -> None:
        """Leave the others on a shared GPU their turn."""
        if takes_turns(self._config.fleet):
            self._all("release_gpu_cache", seconds=self._config.fleet.deadlines.release_gpu_cache)

    def _learn(self, meal: UpdateInputs) -> UpdateMetrics:
        deadlines = self._config.fleet.deadlines
        offers, self._offers = self._offers, []
        wait.gather(offers, what="what was offered to the learner group", seconds=deadlines.update)
        try:
            self._feed(meal)
        except wait.InputGone as error:
            self._tell(f"the samples of iteration {meal.iteration} are taken from the run folder ({error.reason})")
            meal = self._meal = replace(meal, groups=self._supply())
            self._feed(meal)
        metrics: UpdateMetrics = self._ask("update", meal.iteration, seconds=deadlines.update)[0]
        self._metrics = metrics
        return metrics

    def _feed(self, meal: UpdateInputs) -> None:
        # Twice the deadline of each of its two fetches, which names what does not arrive.
        seconds = 4 * self._config.fleet.deadlines.fetch
        self._ask("feed", meal.iteration, meal.groups, meal.embeddings, seconds=seconds)

    def _rebuild(self, error: wait.WorkerGone) -> None:
        """New ranks at the state to begin with or the last one, and the open update done again.

        Raises RunError if no replacement is left.
        """
        while True:
            self._budget.spend("the learner group", str(error))
            self._tell(f"the learner group is rebuilt from {self._origin} ({error})")
            self._renew()
            try:
                self._join(self._beginning())
                if self._meal is not None:
                    self._learn(self._meal)
                return
            except wait.WorkerGone as again:
                error = again

    def _begin_with(self, origin: str, state: Callable[[], LearnerState | None]) -> None:
        """Note what a group that is rebuilt from now on begins with; `origin` is what the user is told of it."""
        self._origin, self._beginning = origin, state

    def _renew(self) -> None:
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._rebuilt += 1
        self._offers = []
        self._ranks = self._spawn_all()

    def _wanted(self) -> str:
        learners, ranks = self._config.fleet.learners, self._config.learner.world_size
        each = amounts({"GPU": learners.num_gpus, "CPU": learners.num_cpus})
        return f"{ranks} learner ranks ({each} each, fleet.learners.placement {learners.placement})"

    def _spawn_all(self) -> list[Any]:
        return [self._spawn(rank, self._rebuilt) for rank in range(self._config.learner.world_size)]

    def _all(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """As `_ask`, of a group that is rebuilt if it is lost."""
        while True:
            try:
                return self._ask(method, *arguments, seconds=seconds)
            except wait.WorkerGone as error:
                self._rebuild(error)

    def _ask(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        refs = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        return wait.gather(refs, what=f"{method} of the learner group", seconds=seconds)


def _checkpoint(state: LearnerState | None) -> str:
    return "revision 0" if state is None else f"the checkpoint after {state.updates} updates"
