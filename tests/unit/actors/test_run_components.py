"""What a controller finds in its run folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.run_components import read_folder, replace_encoder
from actors.world import Process
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError, UserError, WorkerGone
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.storage.resume import check_prompts
from solrl_ray.storage.run_folder import RunFolder
from tests.simulated import virtual_clock
from tests.simulated.memory_disk import MemoryDisk
from tests.simulated.world import SimulatedWorld
from tests.support.documents import ROOT


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_prompts_that_changed_after_the_command_has_read_them_are_refused(tmp_path: Path, part: str) -> None:
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.txt").write_text(f"a {name} cat\na {name} dog\n")
    config = load(
        [ROOT / "configs" / "demo.yaml"],
        [f"prompts={{train: {tmp_path}/train.txt, heldout: {tmp_path}/heldout.txt}}", "rollout.prompts=1"],
    )
    folder = RunFolder(tmp_path / "run")
    check_prompts(folder, config)
    found = read_folder(folder, config)
    assert [prompt.text for prompt in found.heldout] == ["a heldout cat", "a heldout dog"]
    assert [prompt.text for prompt in found.train] == ["a train cat", "a train dog"]
    assert found.point.updates == 0
    folder.lock.release()
    (tmp_path / f"{part}.txt").write_text("a bird\nanother bird\n")
    with pytest.raises(
        UserError, match=rf"^prompts\.{part} is .*{part}\.txt', whose prompts are not those that the run in "
    ):
        read_folder(RunFolder(tmp_path / "run"), config)


class Embeddings:
    """Notes who joins."""

    def __init__(self, has_started: bool) -> None:
        self.started = asyncio.Event()
        if has_started:
            self.started.set()
        self.joined: list[str] = []

    def join(self, name: str, actor: Any) -> None:
        self.joined.append(name)


class World(SimulatedWorld):
    def process(self, actor: Any) -> Process:
        process: Process = actor.player
        return process


class Lost:
    """The parts of a run that an encoder's loss concerns."""

    def __init__(self, *, started: bool = True) -> None:
        nobody = Process()
        self.world = World(lambda role, name: nobody, MemoryDisk())
        self.embeddings: Any = Embeddings(started)
        self.told: list[str] = []
        self.fleet: Any = SimpleNamespace(replacements=Replacements(2), lost=lambda name, *_: self.told.append(name))

    def lose(self, name: str, process: Process) -> bool:
        actor = self.world.text_encoder(name)
        actor.player = process
        error = WorkerGone("encoding 3 prompts", "it died")
        taken = replace_encoder(self.world, self.fleet, self.embeddings, name, actor, error)
        assert not actor.alive
        return taken


def test_a_lost_encoder_is_replaced_as_long_as_replacements_are_left() -> None:
    async def play() -> None:
        scene = Lost()
        assert scene.lose("encoder-0", Process())
        assert scene.lose("encoder-0.1", Process())
        assert scene.embeddings.joined == ["encoder-0.1", "encoder-0.2"]
        assert scene.told == ["encoder-0", "encoder-0.1"]
        with pytest.raises(RunError, match=r"^encoder-0\.2 was lost \(it died\), and all 2 replacements"):
            scene.lose("encoder-0.2", Process())

    virtual_clock.run(play())


def test_the_loss_of_a_card_counts_once() -> None:
    async def play() -> None:
        scene = Lost()
        scene.lose("encoder-0", Process("card-0", counted=True))  # another role was noticed first
        scene.lose("encoder-1", card := Process("card-1"))
        assert scene.fleet.replacements.left == 1
        assert card.counted

    virtual_clock.run(play())


def test_an_encoder_that_never_started_is_not_replaced() -> None:
    async def play() -> None:
        scene = Lost(started=False)
        assert not scene.lose("encoder-0", Process())
        assert scene.embeddings.joined == []

    virtual_clock.run(play())
