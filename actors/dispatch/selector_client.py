"""The controller's line to the selector, which is restarted in place when it dies or hangs.

A new selector replays the journals of the open iterations, is brought the groups once more, which the old one may not
have written yet, and is told which units are at work. What the old one did not acknowledge is sent again; had it been
journaled already, it folds away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from actors.cluster import wait
from actors.cluster.rpc import send
from actors.fleet.budget import Budget
from actors.workers.selector import Ack, Opened
from solrl_ray.records import WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.worker_state import replacement_name


class SelectorClient:
    def __init__(
        self,
        spawn: Callable[[str], Any],
        *,
        seconds: float,
        budget: Budget,
        held: Callable[[], list[tuple[str, WorkUnit]]],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            spawn: makes the actor of a given name.
            seconds: deadline of one call.
            budget: from which each restart takes one.
            held: worker and unit of everything at work.
            tell: is given a sentence for the user.
        """
        self._spawn, self._seconds, self._budget, self._held, self._tell = spawn, seconds, budget, held, tell
        self._name = "selector"
        self._actor = spawn(self._name)
        self._plans: dict[int, IterationPlan] = {}
        self._revised: dict[int, str] = {}
        self._groups: dict[int, list[Any]] = {}
        """By iteration: references of the groups that were taken."""
        self.restarts = 0

    def open(self, plan: IterationPlan) -> Opened:
        """Begin an iteration; from now on, until `drop`, a new selector goes on with it."""
        self._plans[plan.iteration] = plan
        opened: Opened = self.ask("open", plan)
        return opened

    def revise(self, iteration: int, policy_digest: str) -> Opened:
        """`Selector.revise`, from now on of a new selector too."""
        self._revised[iteration] = policy_digest
        opened: Opened = self.ask("revise", iteration, policy_digest)
        return opened

    def drop(self, iteration: int) -> None:
        """Forget an iteration: a checkpoint holds what was learned from it."""
        self._plans.pop(iteration, None)
        self._revised.pop(iteration, None)
        self._groups.pop(iteration, None)
        self.ask("drop", iteration)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The selector's answer. Raises as `wait.get`, but for the loss of the selector."""
        return self._repeat(lambda: (self._call(method, *arguments), None))[0]

    def take_groups(self, iteration: int, groups: Sequence[Any]) -> list[Ack]:
        """`Selector.take_groups` of one iteration's, given by reference."""
        taken: list[Ack] = self.ask("take_groups", *groups)
        self._groups.setdefault(iteration, []).extend(
            group for group, each in zip(groups, taken, strict=True) if not each.refused
        )
        return taken

    def assemble(self, unit: WorkUnit, *parts: Any) -> tuple[tuple[float, ...], Any]:
        """`Selector.assemble` of parts given by reference: rewards, and the reference of the group."""

        def attempt() -> tuple[Any, Any]:
            rewards, group = send(self._actor, "selector", "assemble", unit, *parts, parts=2)
            what = f"putting the group of prompt {unit.prompt_id} together"
            return wait.get(rewards, what=what, seconds=self._seconds), group

        rewards, group = self._repeat(attempt)
        self._groups.setdefault(unit.iteration, []).append(group)
        return rewards, group

    def stored(self, iteration: int, prompt_id: str) -> Any:
        """Reference of a finished group as the run folder holds it; returns once it is there.

        None if the folder does not hold it any more, and it is to be made again.
        """

        def attempt() -> tuple[Any, Any]:
            acknowledged, group = send(self._actor, "selector", "stored", iteration, prompt_id, parts=2)
            what = f"reading the group of prompt {prompt_id}"
            return wait.get(acknowledged, what=what, seconds=self._seconds), group

        there, group = self._repeat(attempt)
        return group if there else None

    def _call(self, method: str, *arguments: Any) -> Any:
        ref = send(self._actor, "selector", method, *arguments)
        return wait.get(ref, what=f"the selector's answer to {method}", seconds=self._seconds)

    def _repeat(self, attempt: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        while True:
            try:
                return attempt()
            except wait.WorkerGone as error:
                self._restart(error)

    def _restart(self, error: wait.WorkerGone) -> None:
        while True:
            self._budget.spend("the selector", str(error))
            self._tell(f"the selector is restarted and replays its journal ({error})")
            ray.kill(self._actor, no_restart=True)
            self._name = replacement_name(self._name)
            self._actor = self._spawn(self._name)
            self.restarts += 1
            try:
                for iteration, plan in self._plans.items():
                    self._call("open", plan)
                    if iteration in self._revised:
                        self._call("revise", iteration, self._revised[iteration])
                    for group in self._groups.get(iteration, []):
                        with suppress(wait.InputGone):  # it went down with its node, and is made again
                            self._call("take_again", group)
                self._call("hold", self._held())
                return
            except wait.WorkerGone as again:
                error = again
