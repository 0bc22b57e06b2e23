"""What a controller finds in its run folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.run_components import RunComponents
from actors.world import Process
from solrl_ray.config.loading import load
from solrl_ray.errors import RunError, UserError, WorkerGone
from solrl_ray.scheduling.worker_state import Replacements
from solrl_ray.storage.resume import check_prompts
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
    nobody: Any = None

    async def made() -> RunComponents:
        return RunComponents(config, tmp_path / "run", SimulatedWorld(nobody, MemoryDisk()))

    first = virtual_clock.run(made())
    check_prompts(first.folder, config)
    first._find()
    assert [prompt.text for prompt in first.heldout] == ["a heldout cat", "a heldout dog"]
    first.folder.lock.release()
    (tmp_path / f"{part}.txt").write_text("a bird\nanother bird\n")
    with pytest.raises(
        UserError, match=rf"^prompts\.{part} is .*{part}\.txt', whose prompts are not those that the run in "
    ):
        virtual_clock.run(made())._find()


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

    def __init__(self, folder: Path, *, started: bool = True) -> None:
        config, nobody = load([ROOT / "configs" / "demo.yaml"], ["fleet.max_replacements=2"]), Process()
        self.world = World(lambda role, name: nobody, MemoryDisk())
        self.parts = RunComponents(config, folder, self.world)
        self.embeddings = Embeddings(started)
        self.parts.embeddings = self.embeddings  # type: ignore[assignment]
        self.told: list[str] = []
        self.parts.fleet = SimpleNamespace(  # type: ignore[assignment]
            replacements=Replacements(2), lost=lambda name, *_: self.told.append(name)
        )

    def lose(self, name: str, process: Process) -> bool:
        actor = self.world.text_encoder(name)
        actor.player = process
        taken = self.parts._encoder_lost(name, actor, WorkerGone("encoding 3 prompts", "it died"))
        assert not actor.alive
        return taken


def test_a_lost_encoder_is_replaced_as_long_as_replacements_are_left(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Lost(tmp_path)
        assert scene.lose("encoder-0", Process())
        assert scene.lose("encoder-0.1", Process())
        assert scene.embeddings.joined == ["encoder-0.1", "encoder-0.2"]
        assert scene.told == ["encoder-0", "encoder-0.1"]
        with pytest.raises(RunError, match=r"^encoder-0\.2 was lost \(it died\), and all 2 replacements"):
            scene.lose("encoder-0.2", Process())

    virtual_clock.run(play())


def test_the_loss_of_a_card_counts_once(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Lost(tmp_path)
        scene.lose("encoder-0", Process("card-0", counted=True))  # another role was noticed first
        scene.lose("encoder-1", card := Process("card-1"))
        assert scene.parts.fleet.replacements.left == 1
        assert card.counted

    virtual_clock.run(play())


def test_an_encoder_that_never_started_is_not_replaced(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Lost(tmp_path, started=False)
        assert not scene.lose("encoder-0", Process())
        assert scene.embeddings.joined == []

    virtual_clock.run(play())
