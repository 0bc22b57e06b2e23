"""Places of learner ranks, and the samples that they are fed again when a rank or a node is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from actors.fleet.actor_factory import ActorClasses, ActorFactory
from actors.workers.learner_rank import LearnerRank
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from tests.chaos.learner_ranks import Light, group, light_group
from tests.support.learning import config
from tests.support.patience import SECONDS

pytestmark = pytest.mark.usefixtures("local_ray")


def test_ranks_have_places_together_and_leave_a_node_that_is_about_to_go_if_there_is_room(tmp_path: Path) -> None:
    fleet = {"learners": {"threads": 1, "num_cpus": 0.5}, "deadlines": {"start": SECONDS}}
    settings = config(tmp_path, learner={"world_size": 2}, fleet=fleet)
    factory = ActorFactory(settings, tmp_path, ActorClasses(learner=Light))
    said: list[str] = []

    async def scenario() -> None:
        learners = light_group(settings, factory, said)
        await learners.spawn()
        await learners.start(None)
        await learners.leave({"another node"})
        assert (await learners.state(), said) == (("learner-0", None, 2), [])
        learners.saved()
        await learners.leave({ray.get_runtime_context().get_node_id()})
        assert await learners.state() == ("learner-0.1", "the checkpoint", 2)
        for rank in learners._ranks:
            ray.kill(rank.handle)

    asyncio.run(scenario())
    assert said == ["a node of the learner group is leaving: the group continues elsewhere, from the last checkpoint"]
    remove_placement_group(factory._seats)


def test_ranks_without_room_together_end_the_run_with_what_they_asked_for(tmp_path: Path) -> None:
    fleet = {"learners": {"num_cpus": 1.5}, "deadlines": {"resources": 0.5, "start": 0.5}}  # there are two CPUs
    settings = config(tmp_path, learner={"world_size": 2}, fleet=fleet)
    factory = ActorFactory(settings, tmp_path, ActorClasses(learner=Light))
    wanted = r"2 learner ranks \(1\.5 CPU each, fleet\.learners\.placement PACK\)"
    with pytest.raises(RunError, match=rf"^{wanted} found no room together within 1 s \(fleet\.deadlines\.resources"):
        asyncio.run(light_group(settings, factory, []).spawn())
    assert factory._seats is None


class Fed(Light):
    """Answers to an update with what it was fed for it."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank)
        self._config = config

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        self._fed, _ = LearnerRank._fetch(self, iteration, groups, embeddings)  # type: ignore[arg-type]

    def update(self, iteration: int) -> list[Any]:
        return self._fed


def test_samples_that_are_lost_with_a_node_are_supplied_once_more(tmp_path: Path) -> None:
    settings = config(tmp_path, learner={"world_size": 2})
    said, asked = list[str](), list[int]()

    class Gone:
        def make(self) -> None: ...

    async def supply(iteration: int) -> list[Any]:
        asked.append(iteration)
        return [ray.put("first, stored"), ray.put("second, stored")]

    async def scenario() -> None:
        learners = await group(settings, tmp_path, Fed, said, supply)
        await learners.start(None)
        maker: Any = ray.remote(Gone).options(num_cpus=0).remote()
        ray.kill(maker)
        found = await learners.update(3, [ray.put("first"), maker.make.remote()], [])
        assert found == ["first, stored", "second, stored"]  # type: ignore[comparison-overlap]

    asyncio.run(scenario())
    assert asked == [3]
    (sentence,) = said
    assert sentence.startswith("the samples of iteration 3 are taken from the run folder (")
