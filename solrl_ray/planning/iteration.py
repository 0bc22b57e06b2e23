"""How long an iteration takes: a sum of its stages, because equal units are shared by equal workers.

::

    publish ─► explore ─► what is left to regenerate ─► learn          one revision after another
    publish ─► regenerate ─► learn                                     exploring one iteration ahead, if that takes less

Left out: stragglers, failures, evaluations, prompt encoding, waiting for the disk, and the order in which
units end: if prompts are no multiple of the workers, the last round is taken for half full. docs/guides/planning.md
says how far that is from a simulation of the dispatcher and from measured loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from solrl_ray.config.pools import REGENERATORS, on_cards, shares
from solrl_ray.config.schema import Config
from solrl_ray.config.section import Section
from solrl_ray.config.strategies import is_one_stage, pool_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of the work itself."""

    explore: float
    """One unit of a prompt's pool: previews or, in one stage, the samples themselves."""
    regenerate: float
    """Regeneration of one prompt."""
    update: float
    """One learner update, all ranks at work."""
    early: float = 0.0
    """What of it needs a prompt's samples alone: passes without gradient, by learners that have a GPU of their own."""
    checkpoint: float = 0.0
    """Goes on beside the rollout."""
    publication: float = 0.0
    """Making a revision that is sent."""
    load: float = 0.0
    """Its way to an explorer with a process of its own, verifying it, swapping it in and proving it."""
    merge: float = 0.0
    """Making a revision and merging, quantising and proving it on a card that learns, which has the factors already."""
    onload: float = 0.0
    """Frozen weights that come back to a card (`fleet.offload`)."""


class Orchestration(Section):
    """Milliseconds of the controller, which does one thing at a time."""

    conditions: str
    """Under which they were measured."""
    message: float = 0.0
    """Sending a worker a unit or a revision, and taking the answer."""
    gap: float = 0.0
    """A worker's overhead between two units."""
    iteration: float = 0.0
    """Everything else, once an iteration: opening it, calls to the selector and the learners, metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    parts: dict[str, float]
    """What is waited for → its seconds."""
    busy: dict[str, float]
    """Role → share of the iteration that its workers are busy; `controller`: share of the rollout."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def iteration(config: Config, stages: Stages, costs: Orchestration) -> Iteration:
    """An iteration of a run in progress."""
    explorers, regenerators = config.fleet.explorers.count, config.fleet.regenerators.count
    units = config.rollout.prompts * pool_sampling(config).units
    groups = 0 if is_one_stage(config) else config.rollout.prompts
    message, gap, rest = (ms / 1000 for ms in (costs.message, costs.gap, costs.iteration))
    explore, regenerate = stages.explore + gap, stages.regenerate + gap
    explored, rollout = _rollout(config, explore, regenerate)
    left, load = rollout - explored, _load(config, stages, units)
    messages = (units + groups + explorers + regenerators) * message
    learn = stages.update - _begun(config, stages.early, explore, regenerate)
    # Each explorer is sent the revision, and as many as have work a unit, before the last of them begins.
    waiting = rest + (explorers + min(explorers, units)) * message
    if config.rollout.max_staleness:
        # Explorers go from one iteration to the next. The others wait for them if they take longer.
        exploring = waiting + load + explored
        left = rollout = _rounds(groups, regenerators) * regenerate
        waiting = rest + regenerators * message
        explored = max(0.0, exploring - (waiting + stages.publication + load + left + learn))
    parts = {
        "explore": explored,
        "regenerate after exploring": left,
        "learn": learn,
        "publish": stages.publication + load,
        "frozen weights": stages.onload,
        "orchestration": waiting + max(0.0, messages - load - rollout),
        "checkpoint": max(0.0, stages.checkpoint - max(load + rollout, messages)),
    }
    seconds = sum(parts.values())
    busy = {
        "explorers": units * stages.explore / explorers / seconds,
        "regenerators": groups * stages.regenerate / regenerators / seconds,
        "learners": stages.update / seconds,
        "controller": messages / max(load + rollout, messages),
    }
    return Iteration(parts=parts, busy=busy)


def shared(config: Config) -> bool:
    """Whether an explorer and a regenerator, in processes of their own, share a GPU."""
    explorers, regenerators = config.fleet.explorers, config.fleet.regenerators
    return shares(explorers) and shares(regenerators) and explorers.num_gpus + regenerators.num_gpus <= 1


def _rollout(config: Config, explore: float, regenerate: float) -> tuple[float, float]:
    """Seconds until the last preview, and until the last regenerated group; from a unit's and a group's."""
    prompts, sampling = config.rollout.prompts, pool_sampling(config)
    explorers, regenerators = config.fleet.explorers.count, config.fleet.regenerators.count
    rounds, last = _rounds(prompts * sampling.units, explorers), _rounds(prompts, regenerators)
    explored = rounds * explore
    if is_one_stage(config):
        return explored, explored
    if config.fleet.offload:
        return explored, explored + last * regenerate
    both = min(on_cards(config, "explorers"), on_cards(config, REGENERATORS))
    if shared(config):
        both = min(explorers, regenerators)
    if both == explorers == regenerators:
        rollout = _together(prompts, sampling.units, both, explore, regenerate)
        return rollout - regenerate, rollout
    if both:
        rollout = _some_do_both(prompts, sampling.units, explorers, regenerators, both, explore, regenerate)
        return rollout - regenerate, rollout
    # An explorer begins with `max_inflight` units in a row, so the first prompts end together.
    first = min(sampling.units, config.fleet.max_inflight, rounds)
    rollout = max(
        max(first, _rounds((prompts - later * regenerators) * sampling.units, explorers)) * explore
        + (later + 1) * regenerate
        for later in range(last)
    )
    return explored, rollout


def _together(prompts: int, units: int, cards: int, explore: float, regenerate: float) -> float:
    """Each card does both: its share of all the work, or its full rounds."""
    rounds, last = _rounds(prompts * units, cards), _rounds(prompts, cards)
    work = prompts * (units * explore + regenerate) / cards
    least = max(work, rounds * explore + regenerate, explore + last * regenerate)
    # Prompts whose units several cards share end together, and a card may then get two of them.
    uneven = regenerate / 2 * (1 - 1 / cards) if units > 1 and prompts >= cards else 0.0
    return (least + rounds * explore + last * regenerate) / 2 + uneven


def _some_do_both(
    prompts: int, units: int, explorers: int, regenerators: int, both: int, explore: float, regenerate: float
) -> float:
    """The others explore or regenerate alone."""
    in_turn = both / (explore + regenerate)  # units a second, and groups, of those that do a unit, then a group
    # Units a second, if groups pile up, so that they are done in turn; and if they are done as they come.
    piling_up = (explorers - both) / explore + in_turn
    keeping_up = explorers / (explore + both / regenerators * regenerate / units)
    explored = max(prompts * units / max(piling_up, keeping_up), _rounds(prompts * units, explorers) * explore)
    left = 1.0
    if piling_up > keeping_up:
        done = (explored - explore) * (in_turn + (regenerators - both) / regenerate)
        left = max(1.0, prompts - done)
    work = prompts * (units * explore + regenerate) / (explorers + regenerators - both)
    return max(explored + _rounds(left, regenerators) * regenerate, work)


def _begun(config: Config, early: float, explore: float, regenerate: float) -> float:
    """Seconds of the update that are over when the last samples come: of the prompts before the last round."""
    prompts, units, workers, each = config.rollout.prompts, 1, config.fleet.regenerators.count, regenerate
    if is_one_stage(config):
        units, workers, each = pool_sampling(config).units, config.fleet.explorers.count, explore
    before = _rounds(prompts * units, workers) - 1
    return min(early * (before * workers // units) / prompts, before * each)


def _load(config: Config, stages: Stages, units: int) -> float:
    """Mean seconds until an explorer that gets work holds a revision."""
    working = min(config.fleet.explorers.count, units)
    on = min(working, on_cards(config, "explorers"))
    return (on * stages.merge + (working - on) * stages.load) / working


def _rounds(units: float, workers: int) -> int:
    """In which so many workers do as many units, one each in a round."""
    return math.ceil(units / workers - 1e-9)
