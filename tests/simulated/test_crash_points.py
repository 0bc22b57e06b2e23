"""A run is ended at every operation of a save, and between any two of them, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulated.faults import Fault
from tests.simulated.plans import Plan
from tests.simulated.runs import run, undisturbed
from tests.simulated.test_seeds import SMALL
from tests.simulated.world import SimulatedWorld

SAVE = "the checkpoint after 1 updates"
PLAN = Plan(1, replace(SMALL, prompts=1), explorers=1, regenerators=1, ranks=1)


def points(monkeypatch: pytest.MonkeyPatch) -> tuple[range, range]:
    """Numbers of the disk's operations of a save; and of the controller's works from it to the next update."""
    disk: list[int] = []
    works: list[int] = []
    blocking = SimulatedWorld.blocking

    async def noted(self: SimulatedWorld, work: Callable[[], Any], what: str, seconds: float) -> Any:
        def worked() -> Any:
            before = self.faults.counts["disk"]
            done = work()
            if what.startswith(SAVE):
                disk.extend(range(before + 1, self.faults.counts["disk"] + 1))
            return done

        if what.startswith(SAVE):
            works.append(self.faults.counts["blocking"] + 1)
        return await blocking(self, worked, what, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedWorld, "blocking", noted)
        run(PLAN)
    (save,) = works
    return range(disk[0], disk[-1] + 2), range(save, save + 12)


def test_a_run_goes_on_wherever_its_machine_fails_in_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    operations, works = points(monkeypatch)
    assert len(operations) > 15  # else it is not the save that was noted
    ends = [Fault("disk", number, "loses power") for number in operations]
    ends += [Fault("disk", number, "is full") for number in operations[::4]]
    ends += [Fault("controller", number, "dies beside the disk") for number in works]
    for seed, end in enumerate(ends):
        ended = run(replace(PLAN, ends=(end,)), lost=seed)
        assert ended.digests == undisturbed(PLAN.shape), (str(end), ended.happened, ended.errors)
        assert not ended.missed
        assert len(ended.happened) == 1
