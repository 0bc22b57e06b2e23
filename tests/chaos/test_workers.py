"""Workers are killed or hang in chosen states; the run ends with the bytes of an undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from actors import commands
from actors.explorer import Explorer
from actors.regenerator import Evaluated, GroupReport, Regenerator
from actors.roles import Roles
from actors.selector import Selector
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.records import (
    Attestation,
    Prompt,
    PromptEmbedding,
    Receipt,
    Refusal,
    SampleGroup,
    UnitResult,
    WorkUnit,
)
from solrl_ray.revisions.container import Buffer
from solrl_ray.scheduling.ledger import Outcome
from tests.small import digests, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")


def first_time(root: str | Path, name: str) -> bool:
    """Whether nobody was here before: leaves the file `name` in `root`, once."""
    try:
        Path(root, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill_once(config: Config, name: str) -> None:
    """SIGKILL this process, unless some process was killed for `name` before."""
    if first_time(config.run.root, name):
        os.kill(os.getpid(), signal.SIGKILL)


class KilledBeforeItWorks(Explorer):
    """One is killed while it starts, its replacement while it loads revision 1."""

    def start(self) -> Attestation:
        kill_once(self._config, "start")
        return super().start()

    def load_revision(self, payload: Buffer, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        receipt = super().load_revision(payload, probe, full)
        if isinstance(receipt, Receipt) and receipt.revision == 1:
            kill_once(self._config, "load")
        return receipt


class KilledWhileRegenerating(Regenerator):
    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[GroupReport, SampleGroup]:
        answer = super().regenerate(unit, prompt, embedding)
        if unit.iteration == 1:
            kill_once(self._config, "regenerate")
        return answer


class LosesAGroup(Selector):
    """Once a group is lost on its way here, which Ray reports as the error of the call that was given it."""

    def store(self, group: SampleGroup) -> Outcome:
        if group.iteration == 2 and first_time(self._folder.path.parent, "store"):
            raise ObjectLostError("00", None, "")
        return super().store(group)


def test_workers_killed_while_starting_loading_and_regenerating_do_not_change_the_result(
    calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "killed")
    roles = Roles(explorer=KilledBeforeItWorks, regenerator=KilledWhileRegenerating, selector=LosesAGroup)
    commands.train(config, live=False, roles=roles)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"start", "load", "regenerate", "store"}
    assert digests(config) == digests(calm)
    assert summary(config)["requeued_units"] >= 2


class KilledWhileEvaluating(Regenerator):
    """Once in the evaluation of the base model, once in that of the trained one."""

    def evaluate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding, pictures: bool) -> Evaluated:
        evaluated = super().evaluate(unit, prompt, embedding, pictures)
        kill_once(self._config, f"evaluate-{unit.policy}")
        return evaluated


class Hangs(Explorer):
    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        if unit.iteration == 1 and first_time(self._config.run.root, "hang"):
            time.sleep(3600.0)
        return super().explore(unit, prompt, embedding)


@pytest.mark.slow
def test_a_regenerator_killed_in_evaluations_and_an_explorer_that_hangs_do_not_change_the_result(
    calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "hung", "fleet.deadlines.preview=8")
    began = time.monotonic()
    commands.train(config, live=False, roles=Roles(explorer=Hangs, regenerator=KilledWhileEvaluating))
    assert time.monotonic() - began < 600.0
    marks = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert marks == {"hang", "evaluate-old", "evaluate-ema"}
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)


def rewards(config: Config) -> dict[str, Any]:
    found = {key: value for key, value in summary(config).items() if key.startswith("reward")}
    assert found
    return found


class Dies(Explorer):
    def start(self) -> Attestation:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().start()


def test_a_fleet_that_keeps_dying_ends_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    config = small_config(tmp_path, "dying", "fleet.max_replacements=1")
    with pytest.raises(RunError) as caught:
        commands.train(config, live=False, roles=Roles(explorer=Dies))
    message = str(caught.value)
    assert message.startswith("explorer-0.1 was lost (its worker is gone: The actor is dead because its worker process")
    assert "killed by the OOM killer" in message
    assert message.endswith(", and all 1 replacements of fleet.max_replacements are used")
