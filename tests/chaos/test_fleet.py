"""Fleets of small real actors: who may work together, and who is replaced for what it answers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.actor_factory import Actor
from solrl_ray.config.deadlines import Deadlines
from solrl_ray.errors import NotFiniteError, RunError, UserError
from solrl_ray.records import Attestation, Receipt, WorkUnit
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR
from tests.chaos.fleets import opened
from tests.chaos.pools import Batch, Explored, Worker, revision, run, spawn, units
from tests.support.patience import until

pytestmark = pytest.mark.usefixtures("local_ray")


class Broken(Worker):
    """Finds NaN in units 1 and 2, as memory that is damaged does; its replacements are well. In unit 3 there is NaN."""

    def explore(self, unit: WorkUnit) -> Explored:
        if unit.prompt_id == "p3" or ("." not in self._name and unit.prompt_id in ("p1", "p2")):
            raise NotFiniteError(f"NaN in {unit.id}")
        return super().explore(unit)


def test_a_worker_with_too_many_strikes_is_replaced_and_a_second_refusal_of_a_unit_is_the_runs_error(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        strict = ("fleet.strikes=2", "fleet.max_replacements=2", "fleet.max_inflight=1")
        async with opened(tmp_path, lambda name: spawn(name, kind=Broken), *strict) as scene:
            await scene.publish(EXPLORER, revision(0))
            fine, first, second, never = units(4)
            batch = Batch(scene.fleet.hand_out)
            scene.fleet.hand_out.add(batch, [fine], "explorers")
            await until(lambda: batch.answers)
            scene.fleet.hand_out.add(batch, [first, second], "explorers")
            await until(lambda: len(batch.answers) == 3)
            assert batch.answers == {fine.id: "explorer-0", first.id: "explorer-0.1", second.id: "explorer-0.1"}
            reason = "NaN in explore/0/p1/0-0"
            assert f"{first.in_words} is repeated; strike 1 of 2 for explorer-0: {reason}" in scene.said
            assert f"explorer-0 was lost (strike 2: {reason}); explorer-0.1 takes its place" in scene.said
            assert scene.fleet.replacements.left == 1
            scene.fleet.hand_out.add(batch, [never], "explorers")
            await until(lambda: False)

    refused = r"^explore \(iteration 1, prompt p3, .*\) was refused from explorer-0\.1 and from explorer-0\.2: NaN in "
    with pytest.raises(RunError, match=refused):
        run(test)


class Dies(Worker):
    def start(self) -> Attestation:
        os._exit(1)


def newcomer(name: str) -> Actor:
    """The second explorer is of another score class than the first; the third cannot start, the fourth dies in its
    start, and so does the one that takes its place; for the sixth there is no room."""
    if name == "explorer-5":
        return spawn(name, resources={"nowhere": 1})
    if name.startswith("explorer-3"):
        return spawn(name, kind=Dies)
    failure = (lambda: UserError("model.path: no such folder")) if name == "explorer-2" else None
    return spawn(name, "B" if name == "explorer-1" else "A", failure)


def test_newcomers_that_cannot_work_with_the_others_leave_them_at_their_work(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, newcomer, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(lambda: scene.ready() == ["explorer-0"])
            assert await scene.fleet.scale({"explorers": 4}) == (
                "explorers go from 1 to 4: new ones work once they have started and proved their weights"
            )
            await until(lambda: sum("cannot work with the others" in message for message in scene.said) == 3)
            assert list(scene.explorers.workers) == ["explorer-0"]
            said = "\n".join(scene.said)
            assert "explorer-1 and explorer-0 would score a unit differently" in said
            assert "explorer-2 cannot work with the others and was removed (model.path: no such folder)" in said
            assert "explorer-3.1 takes its place" in said
            assert "explorer-3.1 cannot work with the others and was removed (its worker is gone: " in said
            assert "1 explorers go on, and `solrl pool scale --explorers 2` tries again" in said
            await scene.telemetry.written()
            assert "explorer-1" not in (tmp_path / "attestations.json").read_text()
            await scene.fleet.scale({"explorers": 2})
            await until(lambda: scene.ready() == ["explorer-0", "explorer-4"])
            scene.explorers._deadlines = Deadlines(start=1.0)
            await scene.fleet.scale({"explorers": 3})
            await scene.says("explorer-5 has found no place for 1 s, and waits; at work: 2")
            await scene.fleet.scale({"explorers": 1})
            await scene.says("explorer-5 leaves after its present units")
            await until(lambda: scene.ready() == ["explorer-0"] == list(scene.explorers.workers))

    run(test)


class Claims(Worker):
    """Says that it holds other weights than revision 1, that it bound nothing of revision 2, and the truth of 3."""

    def load_revision(self, content: Any, probe: Any, full: bool) -> Receipt:
        receipt, number = super().load_revision(content, probe, full), payload.read(content).manifest.revision
        assert isinstance(receipt, Receipt)
        return replace(
            receipt,
            bound_modules=0 if number == 2 else receipt.bound_modules,
            buffer_digest="another" if number == 1 else receipt.buffer_digest,
        )


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1, "does not hold revision 1: its receipt states 2 modules, another; published were 2 modules, [0-9a-f]{12}"),
        (2, "bound no module of revision 2"),
        (3, ""),
    ],
)
def test_a_receipt_of_other_weights_than_were_published_ends_the_run(
    number: int, sentence: str, tmp_path: Path
) -> None:
    async def test() -> None:
        async with opened(tmp_path, lambda name: spawn(name, kind=Claims)) as scene:
            await scene.publish(EXPLORER, revision(number))
            await until(scene.ready)

    if not sentence:
        run(test)
        return
    with pytest.raises(RunError, match=rf"^explorer-0 \(explorer\) {sentence}$"):
        run(test)


def test_a_receipt_counts_however_many_policies_the_other_workers_were_sent_meanwhile(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, spawn, "fleet.max_replacements=1") as scene:
            await scene.publish(EXPLORER, revision(0))
            await until(scene.ready)
            for number in range(1, 7):  # as evaluations do
                await scene.publish(REGENERATOR, revision(number))
            await until(lambda: scene.ready(scene.fleet.regenerators))
            scene.explorers.retire("explorer-0", "of the test")
            await until(lambda: scene.ready() == ["explorer-0.1"])

    run(test)


def mixed(name: str) -> Actor:
    """The second explorer is of another score class than the first."""
    return spawn(name, "B" if name == "explorer-1" else "A")


def test_workers_of_one_pool_that_score_differently_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(tmp_path, mixed, "fleet.explorers.count=2"):
            await until(lambda: False)

    with pytest.raises(RunError, match="workers of one pool must be alike") as caught:
        run(test)
    for words in ("explorer-0", "explorer-1", "device A", "device B"):
        assert words in str(caught.value)
    assert "regenerator" not in str(caught.value)
