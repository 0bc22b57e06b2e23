"""One process a card: explorer, regenerator and learner rank live and die together, and the bytes are those of a split
run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from tests.chaos.notes import Note, Reader, alive
from tests.chaos.noting import CLASSES, NotingLearner
from tests.chaos.test_workers import (
    DEATHS,
    MortalExplorer,
    MortalLearner,
    MortalRegenerator,
    MortalSelector,
    first_time,
    once,
    rewards,
)
from tests.support.patience import patience, wait_until
from tests.support.small import digests, folder, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

CARDS = "fleet.placement=colocated"
TWO_RANKS = ("learner.world_size=2", "fleet.deadlines.collective=300")


def train(config: Config, classes: ActorClasses = CLASSES, resume: bool = False) -> list[Note]:
    """What the players of a whole run have noted; when it has ended, none of their processes is left."""
    launch.train(config, live=False, resume=resume, classes=classes)
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


def test_a_card_is_one_process_with_three_roles_and_goes_on_with_a_split_run_to_the_bytes_of_three_processes(
    calm: Config, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "card", CARDS)
    shutil.copytree(folder(calm), folder(config))
    (folder(config) / "summary.json").unlink()
    for number in (2, 3):
        shutil.rmtree(folder(config) / f"checkpoints/iteration-{number:06d}")
    notes = train(config, resume=True)
    assert digests(config) == digests(calm)
    assert len(processes(notes, "explorer-0", "regenerator-0", "learner-0")) == 1
    assert packed(config)[1:] == [False] * 2  # the first iteration is that of the split run


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


# Losses


class DiesExploring(Explorer):
    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().explore(unit, prompt, embedding)


def test_without_a_replacement_the_death_of_a_card_ends_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, "ends", CARDS, "fleet.max_replacements=0")
    with pytest.raises(RunError, match=r"card-0 was lost \(.*all 0 replacements of fleet\.max_replacements are used$"):
        launch.train(config, live=False, classes=ActorClasses(explorer=DiesExploring))


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


def test_a_card_lives_on_when_another_one_dies_in_an_update(
    split: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = ("fleet.explorers.count=2", "fleet.regenerators.count=2", "fleet.max_replacements=1")
    config = small_config(tmp_path, "survives", CARDS, *TWO_RANKS, *counts)  # one replacement for all roles of a card
    notes = train(config, replace(CLASSES, learner=DiesLearning))
    assert digests(config) == digests(split)
    assert len(processes(notes, "explorer-0", "regenerator-0", "learner-0")) == 1
    dead, successor = processes(notes, "explorer-1", "regenerator-1", "learner-1")
    assert dead == int((tmp_path / "death").read_text())
    assert {note.slot for note in notes if note.pid == successor} == {"explorer-1", "regenerator-1", "learner-1"}
    said = capsys.readouterr().out
    assert said.count("card-1 was lost (") == 1
    assert "card-0 was lost" not in said


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


def test_a_card_on_which_everybody_dies_ends_with_the_same_bytes(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = ("fleet.max_replacements=20", f"fleet.deadlines.explore={patience(8.0)}", "evaluation.every=1")
    config = small_config(tmp_path, "killed", CARDS, *losses)
    launch.train(config, live=False, classes=ALL_MORTAL)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= DEATHS
    assert digests(config) == digests(calm)
    assert rewards(config) == rewards(calm)
    said = capsys.readouterr().out
    assert [sentence for sentence in SAID_OF_A_CARD if not re.search(sentence, said)] == []
