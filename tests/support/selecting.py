"""An iteration of two prompts for a selector, and answers to its units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from actors.workers.selector import Selector
from solrl_ray.records import SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.iteration_state import IterationPlan
from solrl_ray.scheduling.ledger import Outcome

PLAN = IterationPlan(iteration=4, revision=4, prompt_ids=("beef", "cafe"), pool=4, keep=2, unit=2, policy_digest="aa")
AHEAD = replace(PLAN, staleness=1)
REWARDS = {"beef": (0.1, 0.6, 0.3, 0.5), "cafe": (0.5, 0.25, 0.75, 1.0)}
"""Best and worst: 1 and 0 of beef; 3 and 1 of cafe."""

POOL = ["explore/4/beef/0-1", "explore/4/beef/2-3", "explore/4/cafe/0-1", "explore/4/cafe/2-3"]
OF_BEEF, OF_CAFE = "regenerate/4/beef/1-0", "regenerate/4/cafe/3-1"


def ids(units: tuple[WorkUnit, ...]) -> list[str]:
    return [unit.id for unit in units]


def result(unit: WorkUnit, worker: str = "explorer-0", shift: float = 0.0) -> UnitResult:
    rewards = tuple(REWARDS[unit.prompt_id][i] + shift for i in unit.indices)
    return UnitResult(unit=unit, rewards=rewards, worker=worker, score_class="c", seconds=0.1)


def group_of(unit: WorkUnit, *, rewards: tuple[float, ...] = (0.9, 0.1), latent: float = 1.0) -> SampleGroup:
    return SampleGroup(
        iteration=unit.iteration,
        revision=unit.revision,
        prompt_id=unit.prompt_id,
        indices=unit.indices,
        rewards=rewards,
        latents=torch.tensor([[latent], [2.0]]),
        worker="regenerator-0",
    )


def explore(selector: Selector, units: tuple[WorkUnit, ...]) -> tuple[WorkUnit, ...]:
    """Bring results one by one; returns the units that they lead to."""
    acks = [ack for unit in units for ack in selector.accept([result(unit)])]
    assert not any(ack.refused or ack.differs for ack in acks)
    return tuple(ack.chosen for ack in acks if ack.chosen is not None)


def on_disk(selector: Selector, group: SampleGroup) -> Outcome:
    """Bring a group, and wait until it is written."""
    outcome = selector.record_group(group)
    selector._of(group.iteration).settle(wait=True)
    return outcome


def begun(folder: Path) -> Selector:
    """Both prompts are explored but for one unit, and the first one is regenerated."""
    selector = Selector(folder)
    opened = selector.open(PLAN)
    assert (opened.groups, opened.results, opened.message) == ((), (), "")
    assert ids(opened.units) == POOL
    (regenerate,) = explore(selector, opened.units[:3])
    assert regenerate.id == OF_BEEF
    on_disk(selector, group_of(regenerate))
    return selector


def entries(selector: Selector) -> list[str]:
    """What its journal's lines are about."""
    return [entry["kind"] for entry in selector._of(4).journal.entries()]
