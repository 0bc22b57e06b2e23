"""What a run promises whatever happens, beside its digests: about its checkpoints, its budget, and what it forgets.

A mistake in most of these changes no digest: a resumed run makes the same bytes again, from wherever it begins.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from actors import run_components
from actors.controller import Controller
from actors.dispatch import rollouts
from actors.dispatch.open_iteration import OpenIteration, Regenerating
from actors.dispatch.unit_router import Reply
from actors.fleet import fleet
from actors.run_components import RunComponents
from actors.training.learner_group import LearnerGroup
from actors.workers.selector import Ack, Opened
from solrl_ray.config.schema import Config
from solrl_ray.learning.state import LearnerState
from solrl_ray.policy.digest import lora_digest
from solrl_ray.records import WorkUnit
from solrl_ray.report.data import read_run
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.storage.checkpoints import newest_state
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated.players import MODULE, STEPS

COUNTS = ("updates", "steps", "rollbacks")
PARTS = tuple(field.name for field in fields(LearnerState) if field.name not in COUNTS)
SPENT = ("the selector is restarted", "the learner group is rebuilt")
"""How sentences on a loss begin that is paid for, beside those that say who takes somebody's place."""
SHARED = {"the learner group": "learner-", "the selector": "selector"}
"""What is paid for by this name → how the names of its actors begin."""


class Promises:
    """What the drivers of a run have said about its checkpoints."""

    def __init__(self) -> None:
        self.saved: dict[int, LearnerState] = {}
        """Updates → the state of which a driver said that it is saved."""
        self.newest = 0
        """A run goes on from this many updates, or more."""

    def keep(self, state: LearnerState, folder: Path) -> None:
        """The learners were told that a state is saved: all of it must be on the disk."""
        path: Any = RunFolder(folder).checkpoint(state.updates)
        names = [str(file) for file in path.iterdir()] if path.is_dir() else []
        assert any(name.endswith("state.json") for name in names), f"{path} is said to be saved and is not there"
        for name in names:
            assert path.disk.durable(name) == path.disk.path(name).read_bytes(), f"{name} is saved and may be lost"
        check_equal(LearnerState.load(path), state)
        check_equal(self.saved.setdefault(state.updates, state), state)  # made again it is the same
        self.newest = state.updates

    def resumed(self, state: LearnerState | None) -> None:
        """Learners begin with a state."""
        if state is not None and state.updates in self.saved:
            check_equal(state, self.saved[state.updates])


def check_equal(state: LearnerState, saved: LearnerState) -> None:
    """Field by field."""
    mine, other = ([getattr(each, name) for name in COUNTS] for each in (state, saved))
    assert mine == other, f"counters {mine}, not {other}"
    for part in PARTS:
        mine, other = getattr(state, part), getattr(saved, part)
        same = mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
        assert same, f"{part} of the state after {state.updates} updates is not the one that was saved"


class Learners(LearnerGroup):
    """Is asked what the promises need."""

    _made: LearnerState
    _world: Any

    async def state(self) -> LearnerState:
        self._made = await super().state()
        return self._made

    async def load(self, state: LearnerState) -> None:
        self._made = state
        await super().load(state)

    def saved(self) -> None:
        self._world.promises.keep(self._made, self._world.disk.path("/run"))
        super().saved()
        del self._made
        assert self._beginning == self._last_state, "learners keep a state that is on the disk"

    async def _join(self, state: LearnerState | None) -> None:
        self._world.promises.resumed(state)
        await super()._join(state)


def _group(config: Config, world: Any, **others: Any) -> LearnerGroup:
    """Other worlds, which other tests may have in this process, promise nothing."""
    return (Learners if hasattr(world, "promises") else LearnerGroup)(config, world, **others)


run_components.LearnerGroup = _group  # type: ignore[assignment, misc]


class Groups(OpenIteration):
    """Gets each group once, and only groups that the selector has accepted or had before."""

    _restored = False
    _had: frozenset[str] = frozenset()
    """Prompts whose groups came with the revision, from before a resume."""

    def revised(self, opened: Opened) -> None:
        self._had = frozenset(group.prompt_id for group in opened.groups)
        super().revised(opened)

    async def make_again(self, regenerating: Regenerating) -> None:
        self._had = frozenset()
        await super().make_again(regenerating)

    async def _accepted(self, unit: WorkUnit) -> tuple[Reply, Ack]:
        again = unit.stage == "regenerate" and unit.prompt_id in self._had
        assert not again, f"the group of prompt {unit.prompt_id} is made again, which came with the revision"
        return await super()._accepted(unit)

    def _take_groups(self, opened: Opened) -> None:
        self._restored = True
        super()._take_groups(opened)
        self._restored = False

    def _give_to_learner(self, prompt_id: str, rewards: tuple[float, ...], group: Any) -> None:
        assert prompt_id not in self.groups, f"the group of prompt {prompt_id} is made a second time"
        if not self._restored and hasattr(self._world, "promises"):
            accepted = self._selector._groups.get(self.plan.iteration, [])
            assert group in accepted, f"the learners get the group of {prompt_id} before the selector accepted it"
        super()._give_to_learner(prompt_id, rewards, group)


rollouts.OpenIteration = Groups  # type: ignore[misc]


def check_result(folder: RunFolder, config: Config) -> tuple[str, ...]:
    """The result of a finished run is the average of its last checkpoint; returns all of that, for a comparison."""
    from safetensors.torch import load

    _, state, _ = newest_state(folder.checkpoints(), folder.path)
    assert state is not None, "a finished run has no checkpoint"
    assert state.updates == config.run.iterations
    (file,) = folder.lora.iterdir()
    found = load(file.read_bytes())
    for name, factor in state.ema.items():
        strength = config.model.lora.alpha / config.model.lora.rank if name.endswith(".lora_B") else 1.0
        assert torch.equal(found[f"transformer.{name}.weight"], factor * strength), f"{file} is not the average"
    check_best(folder, config)
    return (
        *(str(getattr(state, name)) for name in COUNTS),
        *[lora_digest(factors) for part in PARTS if (factors := getattr(state, part))],
    )


def check_best(folder: RunFolder, config: Config) -> None:
    """``lora_best`` has the average of the checkpoint after which the held-out reward was highest, which is kept."""
    from safetensors.torch import load

    found = {e.iteration: e.reward_mean for e in read_run(folder.path).evaluations if e.policy == "ema"}
    updates = max(sorted(found), key=lambda each: found[each])
    (file,) = folder.lora_best.iterdir()
    b, strength = f"{MODULE}.lora_B", config.model.lora.alpha / config.model.lora.rank
    average = LearnerState.load(folder.checkpoint(updates)).ema[b] * strength
    assert torch.equal(load(file.read_bytes())[f"transformer.{b}.weight"], average), f"{file} is not after {updates}"


def check_rollbacks(folder: RunFolder, config: Config, saved: Mapping[int, LearnerState]) -> None:
    """What a run went back to follows from its evaluations, by arithmetic of our own: an undisturbed run may be wrong
    as well, and a disturbed one then equals it.

    `saved`: as in `Promises`.
    """
    run, went = read_run(folder.path), 0
    found = {e.iteration: e for policy in ("base", "ema") for e in run.evaluations if e.policy == policy}
    for record in run.iterations:
        updates = record.iteration
        # max() gives the first of equal ones.
        best = max((found[n] for n in sorted(found) if n < updates), key=lambda each: each.reward_mean, default=None)
        newest = found.get(updates) if config.run.on_collapse == "rollback" else None
        fell = best is not None and newest is not None and _is_a_fall(best.rewards, newest.rewards)
        expected = best.iteration if fell and best is not None else None
        assert record.rollback == expected, f"iteration {updates} goes back to {record.rollback}, not {expected}"
        went += fell
        made = saved.get(updates + 1)
        origin = updates if expected is None else expected
        if made is None or origin not in saved:  # a driver was killed before it said that it is saved
            continue
        if expected is None:
            counts = [made.rollbacks, made.steps - saved[origin].steps]
            assert counts == [went, STEPS], f"the state after {updates + 1} updates has {counts}"
        else:
            check_equal(made, replace(saved[origin], updates=updates + 1, rollbacks=went))


def _is_a_fall(best: Mapping[str, Sequence[float]], newest: Mapping[str, Sequence[float]]) -> bool:
    """Of two prompts: Student's t with one degree of freedom is Cauchy's distribution; its quantile is a cotangent."""
    one, other = (fmean(newest[prompt]) - fmean(best[prompt]) for prompt in best)
    return -(one + other) / 2 > abs(one - other) / 2 / math.tan(math.pi * 1e-4)


class Budget(Replacements):
    """Remembers what was paid for."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.paid: list[str] = []

    def spend(self, worker: str, reason: str) -> None:
        super().spend(worker, reason)
        self.paid.append(worker)


fleet.Replacements = Budget  # type: ignore[misc]


def check_budget(parts: RunComponents, affected: Collection[frozenset[str]], told: list[str], *, cards: bool) -> None:
    """A replacement is paid for a process that something happened to, and for each at most once. Those that are left
    would hide any other price.

    Args:
        affected: for each such process its name, if it has one, and those of all actors that it had.
        cards: whether processes have several roles, of which each may tell of the loss.
    """
    paid = parts.fleet.replacements.paid  # type: ignore[attr-defined]
    spent = parts.fleet.replacements.total - parts.fleet.replacements.left
    assert spent == len(paid), f"{spent} replacements are used up, for {paid}"
    assert spent <= len(affected), f"{spent} replacements are used up, for {affected}"
    for name, count in Counter(paid).items():
        kind = SHARED.get(name)
        possible = [names for names in affected if name in names or (kind and any(kind in each for each in names))]
        assert count <= (len(possible) if kind else min(1, len(possible))), (
            f"{count} replacements are used up for {name}: {told}"
        )
    rebuilt = sum(text.startswith(SPENT) for text in told)
    replaced = sum(" was lost (" in text and text.endswith(" takes its place") for text in told)
    if not cards:
        assert spent == rebuilt + replaced, f"{spent} replacements are used up; told: {told}"
    elif not any("leaving" in text for text in told):  # which costs nothing
        assert bool(spent) == bool(rebuilt + replaced), f"{spent} replacements are used up; told: {told}"


def check_requeued(parts: RunComponents, told: list[str]) -> None:
    """The iterations' records count each unit that an explorer of this driver lost. With previews only: samples of a
    pool may be made again after the record.
    """
    if parts.config.rollout.strategy != "two_stage":
        return
    found = [re.match(r"(\d+) units of explorer\S* go to others", text) for text in told]
    lost = sum(int(each.group(1)) for each in found if each)
    counted = sum(each.requeued_units for each in parts.telemetry.iterations if each.iteration >= parts.point.updates)
    assert counted >= lost, f"{lost} units went to others, and records count {counted}"


def check_forgotten(controller: Controller, processes: list[Any]) -> None:
    """At the end of a run nothing is left of what is over, and all counts are those of what is there."""
    parts = controller._run
    assert parts is not None
    router, dispatcher = parts.fleet.router, parts.fleet.router._dispatcher
    assert not router._requests, f"units are requested: {list(router._requests)}"
    assert not dispatcher._entries, f"units left: {list(dispatcher._entries)}"
    assert not dispatcher._waiting, f"waiting units: {dispatcher._waiting}"
    assert dispatcher._workers.keys() <= router._workers.keys(), f"gone workers are left: {dispatcher._workers.keys()}"
    held = [unit.id for worker in dispatcher._workers.values() for unit in worker.units]
    assert not held, f"workers have {held}, which no task awaits"
    holders = Counter((worker.pool, worker.holds) for worker in dispatcher._workers.values() if worker.holds)
    assert dispatcher._holders == holders, f"{dispatcher._holders} instead of {holders}"
    client = parts.rollouts._selector
    assert not client._inbox, f"answers left: {client._inbox}"
    for kept in (client._plans, client._revised, client._results, client._groups):
        assert set(kept) <= set(parts.rollouts._open), f"the selector's client keeps {set(kept)}"
    for this in parts.rollouts._open.values():
        at_work = [prompt for prompt, task in this._prompts_at_work.items() if not task.done()]
        assert not at_work, f"groups of {at_work} are still made"
        assert not this._unexplored, f"{this._unexplored} are unexplored"
    assert not parts.learners._offers
    assert parts.learners._inputs is None, "learners keep what they were given"
    locks = parts.learners._turn, parts.publisher._turn, client._restarting
    assert not any(lock.locked() for lock in locks)
    assert not parts.embeddings._queue
    assert not parts.embeddings._coming
    assert not any(process._ahead for process in processes), "a process is still waited for"
