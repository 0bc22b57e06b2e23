"""Everybody is killed or stopped in chosen states of one run; it ends with the bytes of an undisturbed one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Evaluated, Regenerator
from actors.workers.selector import Ack, Selector
from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, RunError
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.records import Attestation, Prompt, PromptEmbedding, Receipt, Refusal, SampleGroup, UnitResult, WorkUnit
from solrl_ray.scheduling.ledger import Outcome
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.receive import Receiver
from tests.chaos.notes import alive
from tests.support.patience import patience, wait_until
from tests.support.small import digests, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")


def first_time(root: str | Path, name: str) -> bool:
    """Whether nobody was here before: leaves the file `name` in `root`, once, with the process's id."""
    try:
        with Path(root, name).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def once(root: str | Path, name: str, how: signal.Signals = signal.SIGKILL) -> None:
    """SIGKILL this process, or stop it, unless some process was for `name` before."""
    if first_time(root, name):
        os.kill(os.getpid(), how)


def accepted(config: Config, unit: WorkUnit) -> bool:
    """Whether the journal has the unit's result."""
    entries = RunFolder.of(config).journal(unit.iteration).entries()
    return any(e.get("prompt") == unit.prompt_id and e.get("indices") == list(unit.indices) for e in entries)


class MortalExplorer(Explorer):
    """Killed while it starts, in a unit, when it has written one layer of revision 1, and after its answer was taken;
    then stopped.

    One whose answer of iteration 1 was taken is left to the learner, which kills it when nobody has work.
    """

    _answered: WorkUnit | None = None

    def start(self) -> Attestation:
        once(self._config.run.root, "explorer starting")
        return super().start()

    def load_revision(self, payload: Payload, probe: PromptEmbedding, full: bool) -> Receipt | Refusal:
        self._dies_between_two_layers()
        return super().load_revision(payload, probe, full)

    def _dies_between_two_layers(self) -> None:
        overwrite = Receiver._overwrite

        def overwritten(payload: Payload, *arguments: Any) -> Any:
            held = overwrite(self._receiver, payload, *arguments)
            if payload.manifest.revision == 1:
                once(self._config.run.root, "explorer loading")
            return held

        self._receiver._overwrite = overwritten  # type: ignore[method-assign]

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        root, before = Path(self._config.run.root), self._answered
        if unit.iteration == 0:
            self._dies_between_two_solver_steps()
        if unit.iteration == 1 and before is not None and before.iteration == 1:
            if not (root / "explorer sent").exists():
                wait_until(f"{before.id} in the journal", lambda: accepted(self._config, before))
                once(root, "explorer sent")
            root.joinpath("idle").write_text(str(os.getpid()))
        if unit.iteration == 2:
            once(root, "explorer stopped", signal.SIGSTOP)
        result = super().explore(unit, prompt, embedding)
        self._answered = unit
        return result

    def _dies_between_two_solver_steps(self) -> None:
        (sampler,) = self._sampler._samplers.values()
        model, root, steps = sampler._model, self._config.run.root, []
        velocity = type(model).velocity

        def counted(*arguments: Any) -> Any:
            steps.append(1)
            if len(steps) == 2:
                once(root, "explorer in a unit")
            return velocity(model, *arguments)

        model.velocity = counted  # type: ignore[method-assign]


class MortalRegenerator(Regenerator):
    """Killed with a group of iteration 1 in its hands, and with a prompt evaluated with the base, and after the last
    update."""

    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        answer = super().regenerate(unit, prompt, embedding)
        if unit.iteration == 1:
            once(self._config.run.root, "regenerator in a unit")
        return answer

    def evaluate(
        self, unit: WorkUnit, prompts: Sequence[Prompt], pictures: int, *embeddings: PromptEmbedding
    ) -> Evaluated:
        evaluated = super().evaluate(unit, prompts, pictures, *embeddings)
        if unit.revision in (0, self._config.run.iterations):
            once(self._config.run.root, f"regenerator in the evaluation after {unit.revision} updates")
        return evaluated


class MortalSelector(Selector):
    """Killed between journal and acknowledgement; and once it loses a group on its way here, as a dead node does."""

    def record(self, result: UnitResult) -> Ack:
        ack = super().record(result)
        if result.unit.iteration == 1:
            once(self._folder.path.parent, "selector journaled")
        return ack

    def record_group(self, group: SampleGroup) -> Outcome:
        if group.iteration == 2 and first_time(self._folder.path.parent, "group lost"):
            raise ObjectLostError("00", None, "")
        return super().record_group(group)


class MortalLearner(LearnerRank):
    """Does not get its samples at first in update 1, kills an idle explorer in it, dies in update 2 after a backward.

    Of the samples that it is given instead, from the run folder, one file is cut in half.
    """

    def offer(self, iteration: int, *arguments: Any) -> None:
        if iteration > 0:
            super().offer(iteration, *arguments)

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        if iteration == 1 and first_time(self._config.run.root, "samples lost"):
            stored = min((RunFolder.of(self._config).path / "samples/iteration-000001").glob("*.safetensors"))
            os.truncate(stored, stored.stat().st_size // 2)
            raise InputGone("fetching the samples", "an object it needs is lost")
        if iteration == 1:
            Path(self._config.run.root, "offered").write_text(str(self._joined.taken))
        super().feed(iteration, groups, embeddings)

    def update(self, iteration: int) -> UpdateMetrics:
        root = Path(self._config.run.root)
        if iteration == 1 and first_time(root, "explorer idle"):
            os.kill(int(root.joinpath("idle").read_text()), signal.SIGKILL)
        if iteration == 2:
            engine = self._joined._engine
            backward = engine.backward

            def killed(*arguments: Any, **keywords: Any) -> None:
                backward(*arguments, **keywords)
                once(root, "learner in an update")

            engine.backward = killed  # type: ignore[method-assign]
        return super().update(iteration)


DEATHS = {
    "explorer starting",
    "explorer in a unit",
    "explorer loading",
    "explorer sent",
    "explorer idle",
    "explorer stopped",
    "regenerator in a unit",
    "regenerator in the evaluation after 0 updates",
    "regenerator in the evaluation after 3 updates",
    "selector journaled",
    "group lost",
    "samples lost",
    "learner in an update",
}


SAID = (
    r"explorer-\d\S* was lost \(its worker is gone: .*\); explorer-\d\S* takes its place",
    r"\d units of explorer-\d\S* go to others",
    r"explorer-\d\S* was lost \(explore \(iteration 3, .*\) passed its deadline of \d+ s\)",
    r"regenerator-0 was lost \(its worker is gone: .*\); regenerator-0\.1 takes its place",
    r"regenerator-0\.1 was lost \(its worker is gone: .*\); regenerator-0\.2 takes its place",
    r"regenerator-0\.2 was lost \(its worker is gone: .*\); regenerator-0\.3 takes its place",
    r"the selector is restarted and replays its journal \(the selector's answer to \w+ failed: its worker is gone: ",
    r"regenerate \(iteration 3, .*\) is done again \(",
    r"the samples of iteration 1 are taken from the run folder \(",
    r"the stored group of prompt \S+ is damaged: it is made again",
    r"the learner group is rebuilt from the last checkpoint \(update of the learner group failed: its worker is gone: ",
)
"""What docs/reference/failures.md says that a user sees of them."""


def test_a_run_in_which_everybody_dies_ends_with_the_same_bytes(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = (
        "fleet.explorers.count=2",
        "fleet.max_replacements=20",
        f"fleet.deadlines.explore={patience(8.0)}",
    )
    beside = "evaluation.every=1"  # beside update 1, before which a damaged group is made again
    config = small_config(tmp_path, "killed", *fleet, beside)
    classes = ActorClasses(
        explorer=MortalExplorer, regenerator=MortalRegenerator, selector=MortalSelector, learner=MortalLearner
    )
    launch.train(config, live=False, classes=classes)
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == DEATHS | {"idle", "offered"}
    assert int((tmp_path / "offered").read_text()) > 0  # groups that the learner had before it was fed
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)
    assert summary(config)["requeued_units"] >= 5
    stopped = int((tmp_path / "explorer stopped").read_text())
    wait_until("the end of the process that was stopped", lambda: not alive(stopped))
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID if not re.search(sentence, said)] == []


def rewards(config: Config) -> dict[str, Any]:
    """Of the base and at the end. The best one depends on how often a run evaluates on the way."""
    found = {key: value for key, value in summary(config).items() if key.startswith("reward")}
    del found["reward_best"]
    return found


class Dies(Explorer):
    def start(self) -> Attestation:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().start()


def test_a_fleet_that_keeps_dying_ends_the_run_with_its_diagnosis(tmp_path: Path) -> None:
    config = small_config(tmp_path, "dying", "fleet.max_replacements=1")
    with pytest.raises(RunError) as caught:
        launch.train(config, live=False, classes=ActorClasses(explorer=Dies))
    message = str(caught.value)
    assert message.startswith("explorer-0.1 was lost (its worker is gone: The actor is dead because its worker process")
    assert "killed by the OOM killer" in message
    assert message.endswith(", and all 1 replacements of fleet.max_replacements are used")
