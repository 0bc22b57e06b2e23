"""What is known of a run while it goes on, and after a resume."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from phases import read_spans

from actors.monitoring import telemetry as monitored
from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.world import Tasks
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.metrics.records import EventKind, IterationMetrics
from solrl_ray.records import Attestation
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.made_configs import changed


def unopened(path: Path, config: Config | None = None) -> Telemetry:
    """In Ray's world, of which telemetry needs nothing that needs Ray."""
    return Telemetry(config or made_runs.config(), RunFolder(path), RayWorld.__new__(RayWorld))


@asynccontextmanager
async def telemetry(path: Path) -> AsyncIterator[Telemetry]:
    """Of a new run; everything is on the disk when the block ends."""
    made = unopened(path)
    async with Tasks() as tasks:
        tasks.start(made.keep_writing(), "writing metrics")
        await made.resume([], [])
        yield made
        await made.close()


def attested(path: Path, *attestations: Attestation) -> None:
    async def test() -> None:
        async with telemetry(path) as made:
            for attestation in attestations:
                made.attested(attestation)

    asyncio.run(test())


def stored(path: Path) -> list[Attestation]:
    return [Attestation(**values) for values in json.loads((path / "attestations.json").read_text())]


def test_attestations_of_earlier_workers_survive_a_resume(tmp_path: Path) -> None:
    explorer_0, explorer_1, regenerator = made_runs.attestations()
    attested(tmp_path, explorer_1, explorer_1, regenerator)
    assert stored(tmp_path) == [explorer_1, regenerator]
    elsewhere = replace(explorer_1, device="NVIDIA H200", score_class="cd" * 32)
    attested(tmp_path, explorer_0, elsewhere, regenerator)  # the same names, one of them on another device
    assert sorted(map(str, map(asdict, stored(tmp_path)))) == sorted(
        map(str, map(asdict, [explorer_0, explorer_1, elsewhere, regenerator]))
    )


def test_metrics_and_stages_are_written_in_order_beside_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with telemetry(tmp_path) as made:
            made.state("exploring", stage="rollout")
            made.begin_iteration(0)
            made.iteration(made_runs.iteration(0))
            made.state("learning", stage="learn")
            made.evaluation(made_runs.evaluations()[0], [])
            made.iteration(made_runs.iteration(1))
            made.state("done")
            await made.written()
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3

    asyncio.run(test())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line.get("policy"), line["iteration"]) for line in lines] == [(None, 0), ("base", 0), (None, 1)]
    assert [span.name for span in read_spans(tmp_path)] == ["exploring", "learning"]
    assert list((tmp_path / "tensorboard").iterdir())


def test_constant_rewards_are_told_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with telemetry(tmp_path) as made:
            for number in range(3):
                made.iteration(replace(made_runs.iteration(number), constant_groups=number))
            (message,) = made.progress().messages
            assert message.startswith(
                "warning: iteration 2: Constant reward: rewards.0 (clipscore) was the same for all"
            )
            assert "in 1 of 12 cases" in message

    asyncio.run(test())


def test_progress_has_the_events_since_a_number_and_what_the_run_waits_for(tmp_path: Path) -> None:
    made = unopened(tmp_path)
    for number in range(30):
        made.message(str(number))
    assert made.progress(28).messages == ("28", "29")
    assert made.progress(30).messages == ()
    assert made.progress(-4).messages == ("26", "27", "28", "29")
    made.state("starting workers")
    made.waits_for("the text encoder")
    made.waits_for("the learners")
    found = made.progress()
    assert found.messages == tuple(str(number) for number in range(30))
    assert found.state == "starting workers: waiting for the learners"


def test_events_of_several_processes_are_kept_with_iteration_and_kind(tmp_path: Path) -> None:
    async def test(*sentences: tuple[str, EventKind]) -> None:
        async with telemetry(tmp_path) as made:
            made.begin_iteration(3)
            for what, kind in sentences:
                made.message(what, kind)

    asyncio.run(test(("explorer-1 was lost", "lost"), ("warning: the reward fell", "collapse")))
    file = tmp_path / "events.jsonl"
    file.write_bytes(file.read_bytes() + b'{"time": "2026-11-')  # and is killed
    asyncio.run(test(("an answer was NaN", "strike"), ("warning: constant reward", "note")))
    found = RunFolder(tmp_path).read_events()
    assert [(event.iteration, event.kind, event.what) for event in found] == [
        (3, "lost", "explorer-1 was lost"),
        (3, "collapse", "warning: the reward fell"),
        (3, "strike", "an answer was NaN"),
        (3, "warning", "warning: constant reward"),
    ]
    assert len(file.read_text().splitlines()) == 5  # one of them cut off, and none empty


def test_the_events_that_led_to_an_error_are_kept(tmp_path: Path) -> None:
    made = unopened(tmp_path)

    async def test() -> None:
        async with made.last_events(), Tasks() as tasks:
            tasks.start(made.keep_writing(), "writing metrics")
            await asyncio.sleep(0.0)
            made.message("explorer-1 was lost", "lost")
            raise RunError("no replacement is left")

    with pytest.raises(RunError, match="no replacement"):
        asyncio.run(test())
    assert [event.what for event in RunFolder(tmp_path).read_events()] == ["explorer-1 was lost"]


def test_an_error_of_a_write_ends_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with telemetry(tmp_path) as made:
            (tmp_path / "metrics.jsonl").mkdir()
            made.iteration(made_runs.iteration(0))
            await asyncio.sleep(60.0)

    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        asyncio.run(test())


def test_a_full_disk_is_named_by_the_folder_of_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with telemetry(tmp_path) as made:
            (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
            made.iteration(made_runs.iteration(0))
            await asyncio.sleep(60.0)

    with pytest.raises(OSError, match="No space left on device") as caught:
        asyncio.run(test())
    assert caught.value.filename == str(tmp_path)


def test_what_an_actor_says_that_it_does_holds_until_it_says_something_else_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = unopened(tmp_path)
    made.note("learner-0", "loading transformer")
    made.note("explorer-0", "loading transformer")
    made.note("learner-0", "moving transformer")
    made.note("encoder", "")
    assert made.progress().notes == {
        "learner-0": "moving transformer",
        "explorer-0": "loading transformer",
    }
    made.note("learner-0", "")
    made.lost("explorer-0")
    assert made.progress().notes == {}
    monkeypatch.setattr(monitored, "NOTE_SECONDS", 0.0)
    made.note("learner-1", "loading transformer")  # and dies, so that it says nothing more
    assert made.progress().notes == {}


def test_the_timeline_shows_what_an_actor_did(tmp_path: Path) -> None:
    async def test() -> None:
        async with telemetry(tmp_path) as made:
            for words in ("loading transformer", "loading transformer", "moving transformer", ""):
                made.note("learner-0", words)
            made.note("explorer-0", "loading transformer")  # and dies
            made.lost("explorer-0")

    asyncio.run(test())
    spans = [(span.kind, span.stage, span.worker, span.name) for span in read_spans(tmp_path)]
    assert spans == [("work", "start", "learner-0", f"{verb} transformer") for verb in ("loading", "moving")]


def test_a_resumed_run_goes_on_to_count_where_it_was(tmp_path: Path) -> None:
    iterations: list[IterationMetrics] = [made_runs.iteration(0), made_runs.iteration(1)]
    made = unopened(tmp_path)
    assert made.progress().elapsed < 20

    async def test() -> None:
        await made.resume(iterations, made_runs.evaluations()[:2])
        assert 23 < made.progress().elapsed < 40  # 2 iterations of 10 s, 2 evaluations of 1.5 s, and what passed here
        await made.close()

    asyncio.run(test())


class Exported(RayWorld):
    """Ray's world, whose metrics are kept here."""

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self.counters: Counter[str] = Counter()

    def exporter(self, run: str) -> Any:
        return self

    def set(self, name: str, value: float, **tags: str) -> None:
        self.gauges[name] = value

    def add(self, name: str, value: float, **tags: str) -> None:
        self.counters[name] += int(value)

    def observe(self, name: str, value: float, **tags: str) -> None: ...


def test_sums_of_a_resumed_run_are_those_of_this_process_alone(tmp_path: Path) -> None:
    """Prometheus adds up what processes export: what an earlier one has counted is not counted again."""
    world, costs = Exported(), {"requests": 10, "retries": 1, "prompt_tokens": 300, "completion_tokens": 5}
    counts = {"requeued_units": 1, "dropped": 4, "duplicate_results": 2, "differing_results": 1}
    iterations = [replace(made_runs.iteration(number), reward_costs=costs, **counts) for number in range(3)]
    base, _, last = (replace(each, reward_costs=costs) for each in made_runs.evaluations())
    made = Telemetry(made_runs.config(), RunFolder(tmp_path), world)

    async def test() -> None:
        await made.resume(iterations[:2], [base])
        made.evaluation(replace(last, iteration=2), [])  # before the first iteration of this process
        assert world.gauges["solrl_reward_requests"] == 10
        made.iteration(iterations[2])
        made.evaluation(last, [])

    asyncio.run(test())
    expected = {"reward_requests": 30, "reward_retries": 3, "reward_tokens": 915}
    expected |= {"duplicate_results": 2, "differing_results": 1, "requeued_units": 1, "dropped": 4}
    assert {name: world.gauges[f"solrl_{name}"] for name in expected} == expected
    assert world.counters["solrl_candidates"] == iterations[2].candidates
    assert len(made.iterations + made.evaluations) == 3 + 3


def test_a_disk_that_takes_no_timeline_is_named_and_progress_is_told_meanwhile(tmp_path: Path) -> None:
    made = unopened(tmp_path, changed(made_runs.config(), fleet={"deadlines": {"checkpoint": 0.3}}))
    os.mkfifo(tmp_path / "trace.json")  # who opens it waits for a reader

    async def test() -> int:
        opening, asked = asyncio.create_task(made.resume([made_runs.iteration(0)], [])), 0
        while not opening.done():
            await asyncio.sleep(0.02)
            asked += made.progress().iteration
        await opening
        return asked

    said = r"^opening trace\.json in .* \(fleet\.deadlines\.checkpoint\) passed its deadline of 0\.3 s$"
    with pytest.raises(RunError, match=said):
        asyncio.run(test())
    assert made.progress().iteration == 1
    os.close(os.open(tmp_path / "trace.json", os.O_RDONLY | os.O_NONBLOCK))  # whoever still waits
