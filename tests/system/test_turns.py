"""Learners that share a GPU with explorers and regenerators take turns with them, in a run.

The GPU is one that Ray only counts; the players compute on CPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers import devices
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from actors.workers.regenerator import Regenerator
from solrl_ray.config.schema import Config
from solrl_ray.models.host_memory import SharedRoom
from solrl_ray.policy import adapters
from tests.chaos.notes import Reader
from tests.chaos.noting import NotingExplorer, NotingLearner, NotingRegenerator, noted
from tests.support.small import digests, small_config

pytestmark = pytest.mark.usefixtures("local_ray")

SHARES = (
    "fleet.explorers.num_gpus=0.25",
    "fleet.regenerators.num_gpus=0.25",
    "fleet.learners.num_gpus=0.5",
    "compile.learner=false",  # as the undisturbed run, whose learners have no GPU
)


SAMPLERS = {"explorer-0", "regenerator-0"}


class OnCpu:
    """A player that has a share of a GPU and computes on the CPU."""

    def start(self) -> Any:
        devices.device_of = lambda num_gpus: torch.device("cpu")
        return super().start()  # type: ignore[misc]


def released(method: Callable[[Any], int]) -> Any:
    """Release, with a look at what is left of the transformer's weights."""

    def there(self: Any) -> int:
        bases = [base.untyped_storage() for base in adapters.base_tensors(self._model.transformer)]
        # What a checksum was made of on a CPU is bound to NumPy, and stays.
        return sum(storage.nbytes() for storage in bases if storage.resizable())

    def release(self: Any) -> int:
        before = there(self)
        given, left = method(self), there(self)
        keeps = self._config.fleet.sharing == "keep"
        assert bool(left) == keeps, left
        assert bool(given) == bool(before and not keeps), (given, before)  # who was not asked since has none to give
        rooms = [piece.room for piece in self._resting._pieces.values()]
        inodes = {os.fstat(room.descriptor).st_ino for room in rooms if isinstance(room, SharedRoom)}
        with Path(self._config.run.root, "rooms.jsonl").open("a") as file:
            file.write(json.dumps([type(self).__name__, sorted(inodes)]) + "\n")
        return given

    return noted("resting", release, "rested")


class SharingExplorer(OnCpu, NotingExplorer):
    release_gpu_memory = released(Explorer.release_gpu_memory)


class SharingRegenerator(OnCpu, NotingRegenerator):
    release_gpu_memory = released(Regenerator.release_gpu_memory)


class SharingLearner(OnCpu, NotingLearner):
    offer = noted("taking", LearnerRank.offer, "taken")
    shard = noted("merging", LearnerRank.shard, "merged")
    release_gpu_memory = released(LearnerRank.release_gpu_memory)


@pytest.mark.faults
@pytest.mark.parametrize("sharing", ["keep", pytest.param("lay_down", marks=pytest.mark.slow), "one_at_a_time"])
def test_who_shares_a_gpu_with_learners_takes_turns_with_them(
    sharing: str, calm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "shared", *SHARES, f"fleet.sharing={sharing}")
    monkeypatch.setattr(launch, "with_tier", lambda config: config)  # it would look for that GPU
    roles = ActorClasses(explorer=SharingExplorer, regenerator=SharingRegenerator, learner=SharingLearner)
    launch.train(config, live=False, classes=roles)
    assert digests(config) == digests(calm)
    reader = Reader(tmp_path / "notes.jsonl")
    reader.read()
    does: dict[str, str] = {}
    turns = 0
    for note in reader.notes:
        learner, others = does.get("learner-0", ""), [does.get("explorer-0"), does.get("regenerator-0")]
        if note.who != "learner-0":
            # From the beginning of an update to the learner's rest nobody else does anything.
            assert not turns or learner not in ("updating", "updated", "merging", "merged", "resting"), (note, does)
        elif note.doing == "updating":
            assert others == ["rested", "rested"], does
            turns += 1
        if sharing == "one_at_a_time" and note.who in SAMPLERS and note.doing != "rested":
            (other,) = SAMPLERS - {note.who}
            assert does.get(other) in (None, "rested"), (note, does)
        does[note.who] = note.doing
    assert turns == config.run.iterations
    assert does["learner-0"] == "rested"
    assert "taking" not in [note.doing for note in reader.notes]
    rooms = dict(map(json.loads, (tmp_path / "rooms.jsonl").read_text().splitlines()))
    shared = set(rooms[SharingLearner.__name__]) & set(rooms[SharingRegenerator.__name__])
    assert bool(shared) == (sharing != "keep")  # the frozen base, once for both
