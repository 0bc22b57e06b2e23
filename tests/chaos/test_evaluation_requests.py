"""Evaluations that others ask of a live run, on small actors: when they are done, and who bears what goes wrong."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.client import evaluate_live, live_run
from actors.client.launch import UNANSWERED
from actors.dispatch.prompt_embeddings import PromptEmbeddings
from actors.evaluation.requests import EvaluationRequest, EvaluationRequests, RequestProgress
from actors.training.policy_publisher import PolicyPublisher, PublishedRevision
from actors.workers.regenerator import Evaluated
from actors.world import Tasks
from solrl_ray.config.schema import Config
from solrl_ray.errors import RewardError, RewardNonsense, RunError
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.storage.run_folder import RunFolder
from tests.chaos.fleets import Scene, Worker, opened, revision, run, spawn
from tests.support.patience import patience, until

pytestmark = pytest.mark.usefixtures("local_ray")

FINE = "fine"


class Scores(Worker):
    """Does what a prompt's text says; else its score is the number of updates, plus 100 for the base."""

    def load_revision(self, content: Any, probe: Any, full: bool) -> Any:
        receipt = super().load_revision(content, probe, full)
        self._held = (receipt.policy, receipt.revision)  # type: ignore[union-attr]
        return receipt

    def score(
        self, config: Config, unit: WorkUnit, prompts: Sequence[Prompt], pictured: int, embedding: PromptEmbedding
    ) -> Evaluated:
        (prompt,) = prompts
        assert self._held == (unit.policy, unit.revision)
        assert embedding.prompt_id == prompt.id
        word, _, path = prompt.text.partition(" ")
        if word == "raises":
            raise RewardError("the reward has no tokenizer")
        if word == "nonsense":
            raise RewardNonsense("the reward is NaN")
        if word == "dies" and not Path(path).exists():
            Path(path).touch()
            os._exit(1)
        if word == "kills":
            os._exit(1)
        if word == "waits":
            Path(f"{path}.begun").touch()
            while not Path(path).exists():
                time.sleep(0.02)
        if word == "waits-raises":
            Path(f"{path}.begun").touch()
            while not Path(path).exists():
                time.sleep(0.02)
            raise RewardError("the reward has no tokenizer")
        score = float(unit.revision + 100 * (unit.policy == "base"))
        return Evaluated(unit=unit, rewards=(score,), images=None, seconds=0.1, started=0.0, columns=((score,),))


@dataclass
class Live:
    """What a live run has for others' evaluations, and the questions that are asked of it."""

    scene: Scene
    requests: EvaluationRequests
    publisher: PolicyPublisher

    def submit(self, name: str, texts: Sequence[str], *policies: str, updates: int = 3) -> EvaluationRequest:
        request = EvaluationRequest(
            name=name,
            config=self.scene.config,
            prompts=tuple(Prompt(id=f"p{n}", text=text) for n, text in enumerate(texts)),
            updates=updates,
            publications={policy: revision(updates, policy) for policy in policies or ("ema",)},  # type: ignore[arg-type]
        )
        self.requests.submit(request)
        return request

    def poll(self, name: str) -> RequestProgress:
        progress = self.requests.poll(name)
        assert progress is not None
        return progress

    async def window(self, *, free: bool = True) -> tuple[asyncio.Event, asyncio.Task[None]]:
        """Begin one; it ends when the event is set."""
        ended = asyncio.Event()
        return ended, asyncio.create_task(self.requests.window(ended, free=free))

    async def update(self) -> None:
        """An update that takes as long as there is something to evaluate, but a moment at least."""
        ended, window = await self.window()
        await asyncio.sleep(0.5)
        if not self.requests._debt:
            await until(lambda: all(self.poll(name).found or self.poll(name).error for name in self.requests._open))
        ended.set()
        await asyncio.wait_for(window, patience())

    async def regenerates(self) -> None:
        """Return once the regenerators hold the run's own revision again."""
        await self.publisher.to_regenerators()
        pool = self.scene.fleet.regenerators
        await until(lambda: self.scene.ready(pool) and all(w._loaded is pool.weights for w in pool.workers.values()))


@asynccontextmanager
async def live(folder: Path, *overrides: str) -> AsyncIterator[Live]:
    """A run with one regenerator that may lose nobody; evaluations may have half a second a second."""
    kept = ("fleet.max_replacements=0", "evaluation.share=0.5", "fleet.max_inflight=1", *overrides)
    async with opened(folder, spawn, *kept, regenerator=lambda name: spawn(name, "C", kind=Scores)) as scene:
        config, there = scene.config, scene.world
        async with Tasks() as tasks:
            embeddings = PromptEmbeddings(config, RunFolder(folder).embeddings, there, tasks)
            embeddings.join("encoder-0", there.text_encoder("encoder-0"))
            await embeddings.started.wait()
            nothing: Any = None
            probe = ray.put("probe")
            publisher = PolicyPublisher(config, there, tasks, scene.fleet, nothing, nothing, probe)
            publisher.newest = PublishedRevision(revision(5), "", 0)
            tell = scene.telemetry.message
            asked = EvaluationRequests(config, there, scene.fleet.router, publisher, embeddings, tell)
            this = Live(scene, asked, publisher)
            await this.regenerates()
            yield this


def scores(progress: RequestProgress) -> dict[str, dict[str, float]]:
    assert progress.found is not None
    return {
        policy: {prompt: each.columns[0][0] for prompt, each in found.items()}
        for policy, found in progress.found.items()
    }


def test_what_is_asked_for_is_evaluated_beside_the_next_update_and_the_regenerators_go_back_to_the_run(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            assert this.requests.poll("mine") is None
            this.submit("mine", [FINE, FINE], "base", "ema")
            this.submit("mine", [FINE], "ema")  # asked again: nothing changes
            this.submit("yours", [FINE], "ema", updates=4)
            progress = this.poll("mine")
            assert (progress.done, progress.total, progress.found) == (0, 4, None)
            await this.update()
            assert scores(this.poll("mine")) == {"base": {"p0": 103.0, "p1": 103.0}, "ema": {"p0": 3.0, "p1": 3.0}}
            assert scores(this.poll("yours")) == {"ema": {"p0": 4.0}}
            await this.regenerates()
            this.requests.forget("mine")
            assert this.requests.poll("mine") is None

    run(test)


def test_an_update_that_ends_waits_for_units_at_work_alone_and_the_next_one_takes_up_the_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            clock = [this.scene.world.now()]
            this.scene.world.now = lambda: clock[0]  # type: ignore[method-assign]
            gate = tmp_path / "gate"
            this.submit("mine", [f"waits {gate}", FINE, FINE], "ema")
            ended, window = await this.window()
            await until(Path(f"{gate}.begun").exists)
            ended.set()
            await asyncio.sleep(0.3)
            assert not window.done()
            clock[0] += 8.0  # for which the run waits
            gate.touch()
            await asyncio.wait_for(window, patience())
            assert this.poll("mine").done == 1
            await this.regenerates()
            clock[0] += 7.0  # all 15 earned 7.5 of them
            await this.update()
            assert this.poll("mine").done == 1
            clock[0] += 2.0
            await this.update()
            assert scores(this.poll("mine")) == {"ema": {"p0": 3.0, "p1": 3.0, "p2": 3.0}}

    run(test)


def test_where_there_is_no_time_that_nobody_needs_all_of_it_is_a_debt(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            clock = [this.scene.world.now()]
            this.scene.world.now = lambda: clock[0]  # type: ignore[method-assign]
            gate = tmp_path / "gate"
            this.submit("mine", [f"waits {gate}"], "ema")
            _, window = await this.window(free=False)
            await until(Path(f"{gate}.begun").exists)
            clock[0] += 10.0
            gate.touch()
            await asyncio.wait_for(window, patience())
            assert this.poll("mine").found
            this.submit("yours", [FINE], "ema")
            clock[0] += 9.0
            await this.update()
            assert this.poll("yours").done == 0
            clock[0] += 2.0
            await this.update()
            assert this.poll("yours").done == 1

    run(test)


class Busy:
    """Answers the first questions too late."""

    def __init__(self, late: int) -> None:
        self._late = late

    async def poll(self, name: str) -> str:
        self._late -= 1
        await asyncio.sleep(3600.0 if self._late >= 0 else 0.0)
        return f"progress of {name}"


@pytest.mark.parametrize("late", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_that_answers_late_is_asked_again_and_is_not_taken_for_one_that_ended(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = ray.remote(Busy).options(num_cpus=0).remote(late)  # type: ignore[attr-defined]
    ray.get(controller.__ray_ready__.remote(), timeout=patience())
    monkeypatch.setattr(live_run, "ANSWER_SECONDS", patience(2.0))
    asking = evaluate_live._ask(controller.poll, "mine")
    if late < UNANSWERED:
        assert asyncio.run(asking) == "progress of mine"
    else:
        with pytest.raises(RunError, match=r"^the run's controller.*, 3 times: "):
            asyncio.run(asking)
    ray.kill(controller)


@pytest.mark.parametrize("text", ["raises", "nonsense"])
def test_an_error_in_a_users_reward_ends_the_evaluation_and_not_the_run(text: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            this.submit("mine", [text, FINE], "base", "ema")
            this.submit("yours", [FINE], "ema")
            await this.update()
            error = this.poll("mine").error
            assert isinstance(error, RewardError)
            assert str(error) == {"raises": "the reward has no tokenizer", "nonsense": "the reward is NaN"}[text]
            assert this.poll("mine").found is None
            assert scores(this.poll("yours")) == {"ema": {"p0": 3.0}}
            await this.regenerates()
            assert list(this.scene.fleet.regenerators.workers) == ["regenerator-0"]
            assert not any("strike" in message for message in this.scene.said)

    run(test)


def test_a_worker_that_dies_under_an_evaluation_is_replaced_at_no_charge_and_its_prompt_is_done_again(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            this.submit("mine", [FINE, f"dies {tmp_path / 'died'}", FINE], "ema")
            await this.update()
            assert scores(this.poll("mine")) == {"ema": {"p0": 3.0, "p1": 3.0, "p2": 3.0}}
            await this.regenerates()
            assert list(this.scene.fleet.regenerators.workers) == ["regenerator-0.1"]
            assert any(m.startswith("regenerator-0 was lost (its worker is gone: ") for m in this.scene.said)
            assert this.scene.fleet.replacements.left == 0 == this.scene.fleet.replacements.total

    run(test)


def test_an_evaluation_under_which_three_workers_died_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            this.submit("mine", ["kills"], "ema")
            await this.update()
            error = this.poll("mine").error
            assert isinstance(error, RunError)
            said = "3 workers were lost during the evaluation mine of ema; the last one was regenerator-0.2"
            assert str(error) == said
            await this.regenerates()
            assert list(this.scene.fleet.regenerators.workers) == ["regenerator-0.3"]

    run(test)


def test_an_update_that_needs_regenerators_has_them_after_what_is_evaluated_and_before_what_is_next(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with live(tmp_path) as this:
            gate = tmp_path / "gate"
            this.submit("mine", [f"waits {gate}"], "base", "ema")
            ended, window = await this.window()
            await until(Path(f"{gate}.begun").exists)
            seen = []

            async def supply() -> None:
                async with this.publisher.regenerating():
                    pool = this.scene.fleet.regenerators
                    await until(lambda: this.scene.ready(pool))
                    assert pool.weights is not None
                    seen.append((pool.weights.holds, this.poll("mine").done))

            supplied = asyncio.create_task(supply())
            await asyncio.sleep(0.3)
            assert not seen
            gate.touch()
            await asyncio.wait_for(supplied, patience())
            assert seen == [(("old", 5), 1)]
            await until(lambda: this.poll("mine").found)
            ended.set()
            await asyncio.wait_for(window, patience())

    run(test)
