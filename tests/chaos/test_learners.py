"""A learner rank is killed in chosen states; the rebuilt group ends with the bytes of an undisturbed one."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from actors.fleet.actor_factory import Actor, ActorClasses, ActorFactory
from actors.ray_world import RayWorld
from actors.training.learner_group import LearnerGroup
from actors.workers.learner_rank import LearnerRank
from solrl_ray.config.schema import Config
from solrl_ray.errors import InputGone, RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.policy.digest import lora_digest
from solrl_ray.scheduling.replacements import Replacements
from tests.support.learning import config, embeddings, groups

pytestmark = pytest.mark.usefixtures("local_ray")

STATE_FILES = ("policy.safetensors", "optimizer.safetensors", "state.json")


class KilledWhileUpdating(LearnerRank):
    """The first rank 1 is killed in iteration 1 after its second backward pass, while rank 0 waits for it."""

    def update(self, iteration: int) -> UpdateMetrics:
        if iteration == 1 and self._rank == 1 and ".1" not in ray.get_runtime_context().get_actor_name():
            engine, passes = self._joined._engine, []
            backward = engine.backward

            def killed(*arguments: Any, **keywords: Any) -> None:
                backward(*arguments, **keywords)
                passes.append(1)
                if len(passes) == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            engine.backward = killed  # type: ignore[method-assign]
        return super().update(iteration)


class KilledTwice(LearnerRank):
    """The first rank 1 is killed when it is to meet the others, which wait for it; the rank 0 of the group that is made
    then when it has made update 1 and is asked for its state."""

    def join(self, address: str, port: int, one_host: bool) -> None:
        if self._rank == 1 and "." not in ray.get_runtime_context().get_actor_name():
            os.kill(os.getpid(), signal.SIGKILL)
        super().join(address, port, one_host)

    def state(self) -> LearnerState | None:
        state = super().state()
        if state is not None and state.updates == 2 and ".1" in ray.get_runtime_context().get_actor_name():
            os.kill(os.getpid(), signal.SIGKILL)
        return state


class KilledWhilePublishing(LearnerRank):
    """The first one is killed when its update is done, its state is out and its shard of the revision is wanted."""

    def update(self, iteration: int) -> UpdateMetrics:
        with Path(self._config.run.root).joinpath("updates").open("a") as file:
            file.write(f"{iteration}\n")
        return super().update(iteration)

    def shard(self, *arguments: Any) -> Any:
        if ".1" not in ray.get_runtime_context().get_actor_name():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().shard(*arguments)


async def group(
    settings: Config,
    folder: Path,
    role: type,
    said: list[str],
    supply: Callable[[int], Any] | None = None,
) -> LearnerGroup:
    """Ranks that need no place of their own, and begin again with the last state in `folder`."""

    class Anywhere(ActorFactory):
        def learner(self, rank: int, rebuilt: int = 0) -> Actor:
            name = f"{folder.name}-learner-{rank}" + (f".{rebuilt}" if rebuilt else "")
            make: Any = ray.remote(role).options(name=name, num_cpus=0)
            return Actor(make.remote(settings, rank), "learner", takes_lists=True)

        def seat_learners(self, seconds: float) -> bool:
            return True

    async def last_state() -> LearnerState | None:
        there = sorted(folder.glob("state-*"))
        return LearnerState.load(there[-1]) if there else None

    async def nothing(iteration: int) -> list[Any]:
        raise AssertionError(f"groups of iteration {iteration} were asked for again")

    learners = LearnerGroup(
        settings,
        RayWorld(Anywhere(settings, folder, ActorClasses())),
        last_state=last_state,
        replacements=Replacements(2),
        tell=said.append,
        supply=supply or nothing,
    )
    await learners.spawn()
    return learners


class Light:
    """A rank that only knows where it is and what it was told to load."""

    def __init__(self, config: Config, rank: int) -> None:
        self._loaded: object = None

    def start(self) -> str:
        return "here"

    def node(self) -> str:
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def address(self) -> tuple[str, int]:
        return "here", 1

    def join(self, address: str, port: int, one_host: bool) -> None:
        pass

    def load(self, state: object) -> None:
        self._loaded = state

    def state(self) -> tuple[str, object, int]:
        context = ray.get_runtime_context()
        place = ray.util.get_current_placement_group()
        assert place is not None
        return context.get_actor_name(), self._loaded, place.bundle_count


class Late(Light):
    """The first rank 1 never ends its update."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank)
        self._rank = rank

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        pass

    def update(self, iteration: int) -> tuple[str, object]:
        name = ray.get_runtime_context().get_actor_name()
        if self._rank == 1 and ".1" not in name:
            time.sleep(3600.0)
        return name, self._loaded


def test_a_group_of_which_a_rank_hangs_is_rebuilt_when_its_update_is_late(tmp_path: Path) -> None:
    settings = config(tmp_path, learner={"world_size": 2}, fleet={"deadlines": {"update": 1.0}})
    said: list[str] = []

    async def scenario() -> None:
        learners = await group(settings, tmp_path, Late, said)
        await learners.start(LearnerState(updates=3, steps=3, default={}, old={}, ema={}, exp_avg={}, exp_avg_sq={}))
        name, loaded = await learners.update(3, [], [])  # type: ignore[misc]
        assert (name, loaded.updates) == (f"{tmp_path.name}-learner-0.1", 3)

    asyncio.run(scenario())
    late = "update of the learner group failed: no answer within its deadline of 1 s"
    assert said == [f"the learner group is rebuilt from the checkpoint after 3 updates ({late})"]


def light_group(settings: Config, factory: ActorFactory, said: list[str]) -> LearnerGroup:
    async def last_state() -> Any:
        return "the checkpoint"

    async def supply(iteration: int) -> list[Any]:
        return []

    return LearnerGroup(
        settings,
        RayWorld(factory),
        last_state=last_state,
        replacements=Replacements(0),
        tell=said.append,
        supply=supply,
    )


@pytest.mark.parametrize(("share", "room"), [(0.5, True), pytest.param(0.75, False, marks=pytest.mark.faults)])
def test_ranks_have_places_together_and_leave_a_node_that_is_about_to_go_if_there_is_room(
    tmp_path: Path, share: float, room: bool
) -> None:
    fleet = {"learners": {"threads": 1, "num_cpus": share}, "deadlines": {"start": 60.0}}
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
        (sentence,) = said
        if room:
            assert await learners.state() == ("learner-0.1", "the checkpoint", 2)
            assert sentence == (
                "a node of the learner group is leaving: the group continues elsewhere, from the last checkpoint"
            )
        else:
            assert await learners.state() == ("learner-0", None, 2)
            wanted = "2 learner ranks (0.75 CPU each, fleet.learners.placement PACK)"
            assert f"{wanted} find no room elsewhere yet" in sentence
        for rank in learners._ranks:
            ray.kill(rank.handle)

    asyncio.run(scenario())
    remove_placement_group(factory._seats)


class SlowToMeet(Light):
    """Takes no sample before it has met the others, for which the second group takes a while."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank)
        self._met = False

    def join(self, address: str, port: int, one_host: bool) -> None:
        if ".1" in ray.get_runtime_context().get_actor_name():
            time.sleep(1.0)
        self._met = True

    def offer(self, *arguments: Any) -> None:
        if not self._met:
            raise RunError("was offered samples before it joined its group")

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        pass

    def update(self, iteration: int) -> str:
        return ray.get_runtime_context().get_actor_name() or ""


def test_samples_that_come_while_the_ranks_move_are_fed_later(tmp_path: Path) -> None:
    fleet = {"learners": {"threads": 1, "num_cpus": 0.1}, "deadlines": {"start": 60.0}}
    settings = config(tmp_path, learner={"world_size": 2}, fleet=fleet)
    factory = ActorFactory(settings, tmp_path, ActorClasses(learner=SlowToMeet))

    async def scenario() -> None:
        learners = light_group(settings, factory, [])
        await learners.spawn()
        await learners.start(None)
        learners.saved()
        moved = asyncio.ensure_future(learners.leave({ray.get_runtime_context().get_node_id()}))
        first = 0
        while not moved.done():
            learners.offer(0, [2] * 1000, first, [], [])
            first += 1
            await asyncio.sleep(0.05)
        learners.offer(0, [2] * 1000, first, [], [])
        assert await learners.update(0, [], []) == "learner-0.1"  # type: ignore[comparison-overlap]
        for rank in learners._ranks:
            ray.kill(rank.handle)

    asyncio.run(scenario())
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


class KilledBeforeItsStateIsOut(Fed):
    """The first rank 0 is killed when its update is done; the samples went down with it."""

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        super().feed(iteration, groups, embeddings)
        if self._replaces() and "first" in self._fed:
            raise InputGone("fetching the samples", "an object it needs is lost")

    def state(self) -> Any:
        if not self._replaces():
            os.kill(os.getpid(), signal.SIGKILL)
        return State(self._fed)

    def _replaces(self) -> bool:
        return ".1" in (ray.get_runtime_context().get_actor_name() or "")


@dataclass
class State:
    learned: list[str]

    def check_finite(self) -> None: ...


def test_samples_that_are_lost_when_an_update_was_done_are_supplied_once_more(tmp_path: Path) -> None:
    settings = config(tmp_path)
    said: list[str] = []

    async def supply(iteration: int) -> list[Any]:
        return [ray.put(f"stored, of iteration {iteration}")]

    async def scenario() -> None:
        learners = await group(settings, tmp_path, KilledBeforeItsStateIsOut, said, supply)
        await learners.start(None)
        learned = await learners.learn(3, [ray.put("first")], [])
        assert (learned.update, learned.state) == (["first"], State(["stored, of iteration 3"]))

    asyncio.run(scenario())
    assert [sentence.partition(" (")[0] for sentence in said] == [
        "the learner group is rebuilt from revision 0",
        "the samples of iteration 3 are taken from the run folder",
    ]


def train(settings: Config, folder: Path, role: type, said: list[str]) -> list[list[bytes]]:
    """Two iterations; the files of the states after each."""

    async def scenario() -> None:
        learners = await group(settings, folder, role, said)
        known = [ray.put(embedding) for embedding in embeddings().values()]
        await learners.start(None)
        for iteration in range(2):
            await learners.update(iteration, [ray.put(made) for made in groups(iteration)], known)
            (await learners.state()).save(folder / f"state-{iteration + 1}")
            learners.saved()

    asyncio.run(scenario())
    return [[(folder / f"state-{n}" / name).read_bytes() for name in STATE_FILES] for n in (1, 2)]


def two_ranks(pipeline: Path, zero_stage: int) -> Config:
    return config(pipeline, learner={"world_size": 2, "zero_stage": zero_stage}, fleet={"learners": {"threads": 1}})


class Counting(LearnerRank):
    def taken(self) -> int:
        return self._joined.taken


def test_a_rank_takes_what_it_is_offered_up_to_the_first_gap_and_is_fed_the_rest(tiny_pipeline: Path) -> None:
    settings = config(tiny_pipeline, fleet={"network": "lo"})
    rank = ray.remote(Counting).options(num_cpus=0).remote(settings, 0)

    def call(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(rank, method).remote(*arguments), timeout=120.0)

    def offer(first: int, *offered: Any) -> int:
        """How many groups are in after it."""
        call("offer", 0, [4, 3, 3], first, list(offered), known[first : first + len(offered)])
        return int(call("taken"))

    call("start")
    call("join", *call("address"), False)
    assert call("__ray_call__", lambda _: os.environ["GLOO_SOCKET_IFNAME"]) == "lo"  # that of `fleet.network`
    start = call("state")
    made, known = ([ray.put(one) for one in all_] for all_ in (groups(0), embeddings().values()))
    call("feed", 0, made, known)
    call("update", 0)
    expected = call("state").default

    call("load", start)
    dead = ray.remote(Light).options(num_cpus=0).remote(settings, 1)
    ray.kill(dead)
    lost = dead.state.remote()
    assert offer(0, made[0]) == 1
    assert offer(1, lost) == 1  # no error: it will be fed
    assert offer(2, made[2]) == 1  # out of order now
    assert offer(0, made[0]) == 1  # once more
    with pytest.raises(InputGone, match="fetching the samples of iteration 0 failed"):
        call("feed", 0, [made[0], lost, made[2]], known)
    call("feed", 0, made, known)
    assert call("taken") == 3
    call("update", 0)
    assert lora_digest(call("state").default) == lora_digest(expected)
    ray.kill(rank)


@pytest.fixture(scope="module")
def undisturbed(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[bytes]]]:
    """ZeRO stage → what two ranks come to that nobody disturbs."""

    @functools.cache
    def trained(zero_stage: int) -> list[list[bytes]]:
        folder, said = tmp_path_factory.mktemp(f"undisturbed-{zero_stage}"), list[str]()
        files = train(two_ranks(tiny_pipeline, zero_stage), folder, LearnerRank, said)
        assert said == []
        return files

    return trained


FROM_CHECKPOINT = "the learner group is rebuilt from the last checkpoint ("


@pytest.mark.faults
@pytest.mark.parametrize(
    ("zero_stage", "role", "sentences"),
    [
        (1, KilledWhileUpdating, [FROM_CHECKPOINT]),
        (2, KilledWhileUpdating, [FROM_CHECKPOINT]),
        (2, KilledTwice, ["the learner group is rebuilt from revision 0 (", FROM_CHECKPOINT]),
    ],
)
def test_a_group_that_lost_a_rank_is_rebuilt_to_the_same_bytes(
    undisturbed: Callable[[int], list[list[bytes]]],
    tiny_pipeline: Path,
    tmp_path: Path,
    zero_stage: int,
    role: type,
    sentences: list[str],
) -> None:
    said: list[str] = []
    hurt = tmp_path / f"{role.__name__}-{zero_stage}"
    assert train(two_ranks(tiny_pipeline, zero_stage), hurt, role, said) == undisturbed(zero_stage)
    assert [sentence[: sentence.index("(") + 1] for sentence in said] == sentences


@pytest.mark.faults
def test_what_is_published_after_a_loss_is_what_will_be_saved(tiny_pipeline: Path, tmp_path: Path) -> None:
    settings = config(tiny_pipeline, run={"seed": 7, "root": str(tmp_path)}, fleet={"learners": {"threads": 1}})
    said: list[str] = []

    async def scenario() -> None:
        learners = await group(settings, tmp_path, KilledWhilePublishing, said)
        await learners.start(None)
        known = [ray.put(each) for each in embeddings().values()]
        await learners.update(0, [ray.put(each) for each in groups(0)], known)
        state = await learners.state()
        revision = await learners.revision("old")
        assert len(said) == 1
        assert said[0].startswith("the learner group is rebuilt from its last state, which no checkpoint holds yet (")
        assert lora_digest(revision.factors) == lora_digest(state.old)

    asyncio.run(scenario())
    # Done again, an update might come out otherwise where kernels are not deterministic.
    assert tmp_path.joinpath("updates").read_text() == "0\n"
