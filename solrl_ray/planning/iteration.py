"""The duration of an iteration: the sum of its stages, because equal workers share equal units.

::

    publish ─► explore ─► regenerate the remaining prompts ─► learn    one revision after another
    publish ─► regenerate ─► learn                                     exploring one iteration ahead, if that is shorter

Not included: stragglers, failures, evaluations, prompt encoding, waiting for the disk, and the order in which
units end: if the number of prompts is not a multiple of the workers, the last round counts as half full.
docs/guides/planning.md compares the result with a simulation of the dispatcher and with measured runs.
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
    """Seconds of each stage, without the controller's overhead."""

    explore: float
    """One unit of a prompt's pool: previews, or with one stage the samples themselves."""
    regenerate: float
    """Regeneration of one prompt."""
    update: float
    """One learner update on all ranks."""
    early: float = 0.0
    """Part of the update that can start with the first finished prompt: passes without gradient, if learners have
    separate GPUs.
    """
    checkpoint: float = 0.0
    """Writing a checkpoint, in parallel with the rollout."""
    publication: float = 0.0
    """Building a revision to send."""
    load: float = 0.0
    """Sending a revision to an explorer in a separate process, verifying, loading and attesting it."""
    merge: float = 0.0
    """Building a revision in a learner's process, which already has the factors: merging, quantising and attesting it.
    """
    onload: float = 0.0
    """Copying offloaded weights back to a GPU (`fleet.offload`)."""


class Orchestration(Section):
    """Overhead of the controller in milliseconds. The controller does one thing at a time."""

    conditions: str
    """Conditions of the measurement."""
    message: float = 0.0
    """Sending a unit or a revision to a worker, and receiving the result."""
    gap: float = 0.0
    """Overhead of a worker between two units."""
    iteration: float = 0.0
    """All other overhead per iteration: starting it, calls to the selector and the learners, metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    parts: dict[str, float]
    """Stage → its seconds on the critical path; they add up to the iteration."""
    busy: dict[str, float]
    """Role → share of the iteration in which its workers are busy; for `controller`, the share of the rollout."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def iteration(config: Config, stages: Stages, costs: Orchestration) -> Iteration:
    """The duration of an iteration in the middle of a run."""
    explorers, regenerators = config.fleet.explorers.count, config.fleet.regenerators.count
    units = config.rollout.prompts * pool_sampling(config).units
    groups = 0 if is_one_stage(config) else config.rollout.prompts
    message, gap, once = (ms / 1000 for ms in (costs.message, costs.gap, costs.iteration))
    explore, regenerate = stages.explore + gap, stages.regenerate + gap
    explored, rollout = _rollout(config, explore, regenerate)
    left, load = rollout - explored, _load(config, stages, units)
    messages = (units + groups + explorers + regenerators) * message
    learn = stages.update - _begun(config, stages.early, explore, regenerate)
    # Before the last explorer begins, every explorer is sent the revision, and every explorer with work a unit.
    waiting = once + (explorers + min(explorers, units)) * message
    if config.rollout.max_staleness:
        # Explorers continue with the next iteration at once; the other workers wait only if exploring takes longer.
        exploring = waiting + load + explored
        left = rollout = _rounds(groups, regenerators) * regenerate
        waiting = once + regenerators * message
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
    """Whether an explorer and a regenerator in separate processes share a GPU."""
    explorers, regenerators = config.fleet.explorers, config.fleet.regenerators
    return shares(explorers) and shares(regenerators) and explorers.num_gpus + regenerators.num_gpus <= 1


def _rollout(config: Config, explore: float, regenerate: float) -> tuple[float, float]:
    """Seconds until the last preview and until the last regenerated group, from the seconds per unit and per group."""
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
    # Each explorer starts with `max_inflight` units in a row, so the first prompts end at the same time.
    first = min(sampling.units, config.fleet.max_inflight, rounds)
    rollout = max(
        max(first, _rounds((prompts - later * regenerators) * sampling.units, explorers)) * explore
        + (later + 1) * regenerate
        for later in range(last)
    )
    return explored, rollout


def _together(prompts: int, units: int, gpus: int, explore: float, regenerate: float) -> float:
    """Seconds of a rollout if every GPU explores and regenerates: between an even share of the work and full rounds."""
    rounds, last = _rounds(prompts * units, gpus), _rounds(prompts, gpus)
    work = prompts * (units * explore + regenerate) / gpus
    least = max(work, rounds * explore + regenerate, explore + last * regenerate)
    # Prompts whose units are spread over several GPUs end at the same time, and one GPU may then get two of them.
    uneven = regenerate / 2 * (1 - 1 / gpus) if units > 1 and prompts >= gpus else 0.0
    return (least + rounds * explore + last * regenerate) / 2 + uneven


def _some_do_both(
    prompts: int, units: int, explorers: int, regenerators: int, both: int, explore: float, regenerate: float
) -> float:
    """Seconds of a rollout if `both` GPUs explore and regenerate and the others do only one of these."""
    in_turn = both / (explore + regenerate)  # units per second, and groups per second, of GPUs that alternate
    # Units per second if groups pile up, so that GPUs alternate; and if groups are regenerated as they come.
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
    """Seconds of the update that are done when the last samples arrive: those of the prompts before the last round."""
    prompts, units, workers, seconds = config.rollout.prompts, 1, config.fleet.regenerators.count, regenerate
    if is_one_stage(config):
        units, workers, seconds = pool_sampling(config).units, config.fleet.explorers.count, explore
    before = _rounds(prompts * units, workers) - 1
    return min(early * (before * workers // units) / prompts, before * seconds)


def _load(config: Config, stages: Stages, units: int) -> float:
    """Mean seconds until an explorer with work has loaded a revision."""
    working = min(config.fleet.explorers.count, units)
    on = min(working, on_cards(config, "explorers"))
    return (on * stages.merge + (working - on) * stages.load) / working


def _rounds(units: float, workers: int) -> int:
    """Number of rounds in which the workers finish the units, with one unit per worker and round."""
    return math.ceil(units / workers - 1e-9)
