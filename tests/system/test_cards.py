"""One process a card: explorer, regenerator and learner rank live and die together, and the bytes are those of a split
run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.client import launch
from actors.client.controller_actor import ControllerActor
from actors.client.launch import located
from actors.cluster.names import CONTROLLER, namespace
from actors.fleet.actor_factory import ActorClasses, on_this_node
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Regenerator
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.records import Prompt, PromptEmbedding, SampleGroup, UnitResult, WorkUnit
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.weight_sync.store import RevisionStore
from tests.chaos.notes import Note, Reader, alive
from tests.chaos.noting import CLASSES, NotingExplorer, NotingLearner, NotingRegenerator
from tests.chaos.test_workers import (
    DEATHS,
    MortalExplorer,
    MortalLearner,
    MortalRegenerator,
    MortalSelector,
    first_time,
    once,
    rewards,
    wait_until,
)
from tests.support.gated import Gated
from tests.support.small import digests, folder, small_config
from tests.system.test_scaling import PATIENCE, explorers, wait_for

pytestmark = pytest.mark.usefixtures("local_ray")

CARDS = "fleet.placement=colocated"
TWO_RANKS = ("learner.world_size=2", "fleet.deadlines.collective=60")


def train(config: Config, classes: ActorClasses = CLASSES) -> list[Note]:
    """What the players of a whole run have noted; when it has ended, none of their processes is left."""
    launch.train(config, live=False, classes=classes)
    reader = Reader(Path(config.run.root, "notes.jsonl"))
    reader.read()
    processes = {note.pid for note in reader.notes}
    wait_until("the end of all processes", lambda: not any(map(alive, processes)))
    return reader.notes


def processes(notes: Iterable[Note], *roles: str) -> list[int]:
    """Of these roles, each once, in the order of their first notes."""
    return list(dict.fromkeys(note.pid for note in notes if note.slot in roles))


def packed(config: Config) -> list[bool]:
    """Whether the revision that explored each iteration had packed weights, as the run's metrics say."""
    records = map(json.loads, folder(config).joinpath("metrics.jsonl").read_text().splitlines())
    return [bool(each["publication"]["packed"]) for each in records if each["event"] == "iteration"]


@pytest.fixture(scope="module")
def split(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished, undisturbed run of two learner ranks, each role in a process of its own."""
    config = small_config(tmp_path_factory.mktemp("split"), "split", *TWO_RANKS)
    launch.train(config, live=False)
    return config


def test_a_card_is_one_process_with_three_roles_and_the_bytes_of_three_processes(calm: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path, "card", CARDS)
    notes = train(config)
    assert digests(config) == digests(calm)
    assert len(processes(notes, "explorer-0", "regenerator-0", "learner-0")) == 1
    store = RevisionStore(folder(config) / "revisions")
    assert [store.load(number).name for number in store.revisions()] == ["revision-000002", "revision-000003"]
    assert packed(config) == [False] * 3


def test_cards_and_an_explorer_without_one_share_the_work_of_a_split_run_of_two_ranks(
    split: Config, tmp_path: Path
) -> None:
    counts = ("fleet.explorers.count=3", "fleet.regenerators.count=2")
    config = small_config(tmp_path, "cards", CARDS, *TWO_RANKS, *counts)
    notes = train(config)
    assert digests(config) == digests(split)
    of_cards = [processes(notes, f"explorer-{n}", f"regenerator-{n}", f"learner-{n}") for n in (0, 1)]
    assert [len(each) for each in of_cards] == [1, 1]
    others = processes(notes, "explorer-2")
    assert len({*of_cards[0], *of_cards[1], *others}) == 3
    explored = {note.who for note in notes if note.slot.startswith("explorer") and note.doing == "answered"}
    assert explored == {"explorer-0", "explorer-1", "explorer-2"}
    assert packed(config) == [True] * 3


@pytest.mark.faults
def test_a_run_goes_on_with_the_other_placement_to_the_same_bytes(calm: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path, "moved", CARDS)
    shutil.copytree(folder(calm), folder(config))
    (folder(config) / "summary.json").unlink()
    shutil.rmtree(folder(config) / "checkpoints/iteration-000003")
    launch.train(config, live=False, resume=True)
    assert digests(config) == digests(calm)


@pytest.mark.faults
def test_an_explorer_that_joins_a_card_works_from_the_next_revision_on(calm: Config, tmp_path: Path) -> None:
    config = small_config(tmp_path, "joined", CARDS, "fleet.deadlines.explore=600")
    run = RunFolder.of(config)
    run.create(config, resume=False)
    run.lock.release()
    controller = on_this_node(ControllerActor, CONTROLLER, namespace(run.path))
    handle = controller.remote(located(config), run.path, ActorClasses(explorer=Gated))
    done = handle.run.remote()
    wait_for(handle, lambda p: "explore " in explorers(p).get("explorer-0", "") and p.iteration == 1)
    ray.get(handle.scale.remote({"explorers": 2}), timeout=PATIENCE)
    wait_for(handle, lambda p: explorers(p).get("explorer-1") == "waiting for a revision that is packed for it")
    (tmp_path / "gate-1").touch()
    wait_for(handle, lambda p: "explore " in explorers(p).get("explorer-1", "") and p.iteration == 2)
    (tmp_path / "gate-2").touch()
    ray.get(done, timeout=PATIENCE)
    ray.kill(handle)
    assert digests(config) == digests(calm)
    assert packed(config) == [False, False, True]


# Losses


class DiesExploring(NotingExplorer):
    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        result = super().explore(unit, prompt, embedding)
        if unit.iteration == 1:
            once(self._config.run.root, "death")
        return result


class DiesRegenerating(NotingRegenerator):
    def regenerate(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> tuple[UnitResult, SampleGroup]:
        answer = super().regenerate(unit, prompt, embedding)
        if unit.iteration == 1:
            once(self._config.run.root, "death")
        return answer


class DiesLearning(NotingLearner):
    """The last rank is killed in iteration 1 after its first backward pass."""

    def update(self, iteration: int) -> UpdateMetrics:
        if iteration == 1 and self._rank == self._config.learner.world_size - 1:
            engine = self._joined._engine
            backward = engine.backward

            def killed(*arguments: Any, **keywords: Any) -> None:
                backward(*arguments, **keywords)
                once(self._config.run.root, "death")

            engine.backward = killed  # type: ignore[method-assign]
        return super().update(iteration)


def mortal(role: type) -> ActorClasses:
    bases = {"explorer": Explorer, "regenerator": Regenerator, "learner": LearnerRank}
    players: dict[str, type] = {"explorer": NotingExplorer, "regenerator": NotingRegenerator, "learner": NotingLearner}
    (place,) = (name for name, base in bases.items() if issubclass(role, base))
    return ActorClasses(**(players | {place: role}))


@pytest.mark.parametrize(
    "role",
    [
        DiesExploring,
        pytest.param(DiesRegenerating, marks=pytest.mark.faults),
        pytest.param(DiesLearning, marks=pytest.mark.faults),
    ],
)
def test_a_card_that_dies_is_replaced_as_one_and_the_bytes_stay(
    role: type, calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "killed", CARDS, "fleet.max_replacements=1")  # one for all of its roles
    notes = train(config, mortal(role))
    first, second = processes(notes, "explorer-0", "regenerator-0", "learner-0")
    assert first == int((tmp_path / "death").read_text())
    assert {note.slot for note in notes if note.pid == second} == {"explorer-0", "regenerator-0", "learner-0"}
    assert digests(config) == digests(calm)
    told = [line for line in capsys.readouterr().out.splitlines() if "card-0 was lost (" in line]
    assert len(told) == 1
    assert "), and with it " in told[0]
    for name in ("explorer-0", "regenerator-0", "learner-0"):
        assert name in told[0]


@pytest.mark.faults
def test_a_card_lives_on_when_another_one_dies_in_an_update(
    split: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ("fleet.explorers.count=2", "fleet.regenerators.count=2", "fleet.max_replacements=1")
    config = small_config(tmp_path, "survives", CARDS, *TWO_RANKS, *counts)
    notes = train(config, mortal(DiesLearning))
    assert digests(config) == digests(split)
    assert len(processes(notes, "explorer-0", "regenerator-0", "learner-0")) == 1
    dead, successor = processes(notes, "explorer-1", "regenerator-1", "learner-1")
    assert dead == int((tmp_path / "death").read_text())
    assert {note.slot for note in notes if note.pid == successor} == {"explorer-1", "regenerator-1", "learner-1"}
    said = capsys.readouterr().out
    assert said.count("card-1 was lost (") == 1
    assert "card-0 was lost" not in said


@pytest.mark.faults
def test_without_a_replacement_the_death_of_a_card_ends_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, "ends", CARDS, "fleet.max_replacements=0")
    with pytest.raises(RunError, match=r"card-0 was lost \(.*all 0 replacements of fleet\.max_replacements are used$"):
        launch.train(config, live=False, classes=mortal(DiesExploring))


class LearnerOnACard(MortalLearner):
    def update(self, iteration: int) -> UpdateMetrics:
        first_time(self._config.run.root, "explorer idle")  # of those on its card, nobody is idle during an update
        return super().update(iteration)


ALL_MORTAL = ActorClasses(
    explorer=MortalExplorer, regenerator=MortalRegenerator, selector=MortalSelector, learner=LearnerOnACard
)
LOST = r"card-0\S* was lost \("
SAID_OF_A_CARD = (
    LOST + r"its worker is gone: .*\), and with it explorer-0\S*, regenerator-0\S* and learner-0\S*; a new process ",
    LOST + r"explore \(iteration 3, .*\) passed its deadline of \d+ s\), and with it ",
    r"\d units of explorer-0\S* go to others",
    r"the selector is restarted and replays its journal \(",
    r"regenerate \(iteration 3, .*\) is done again \(",
    r"the samples of iteration 1 are taken from the run folder \(",
    r"the stored group of prompt \S+ is damaged: it is made again",
    r"the learner group is rebuilt from the last checkpoint \(update of the learner group failed: its worker is gone: ",
)


@pytest.mark.timeout(900)
@pytest.mark.faults
def test_a_card_on_which_everybody_dies_ends_with_the_same_bytes(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = ("fleet.max_replacements=20", "fleet.deadlines.explore=8", "evaluation.every=1")
    config = small_config(tmp_path, "killed", CARDS, *losses)
    launch.train(config, live=False, classes=ALL_MORTAL)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= DEATHS
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID_OF_A_CARD if not re.search(sentence, said)] == []
