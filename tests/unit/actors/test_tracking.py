"""Trackers get what a run measures, and a run does not notice what goes wrong there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.monitoring.telemetry import Telemetry
from actors.ray_world import RayWorld
from actors.world import MetricsWriter, Tasks
from solrl_ray.config.schema import Config
from solrl_ray.metrics.records import EvaluationMetrics, IterationMetrics
from solrl_ray.storage.run_folder import RunFolder
from tests.support import made_runs
from tests.support.made_configs import changed


class Notes:
    """A tracker that notes what it gets; `meanwhile` is called before each note."""

    def __init__(self, meanwhile: Callable[[str], None] = lambda _: None) -> None:
        self.got: list[str] = []
        self._meanwhile = meanwhile

    def _note(self, what: str) -> None:
        self._meanwhile(what)
        self.got.append(what)

    def iteration(self, metrics: IterationMetrics) -> None:
        self._note(f"iteration {metrics.iteration}")

    def evaluation(self, metrics: EvaluationMetrics, pictures: list[list[torch.Tensor]]) -> None:
        self._note(f"{metrics.policy} after {metrics.iteration}")

    def close(self) -> None:
        self._note("the end")


class WorldWithTrackers(RayWorld):
    """Ray's world, of which telemetry needs nothing that needs Ray, with other trackers."""

    def __init__(self, **trackers: Callable[[], Notes]) -> None:
        self._trackers = trackers

    def tracker(self, name: str, config: Config, folder: Path) -> MetricsWriter:
        return self._trackers[name]()


def messages(
    path: Path, *, deadline: float = 10.0, made_here: list[Telemetry] | None = None, **trackers: Callable[[], Notes]
) -> tuple[str, ...]:
    """What a run with these trackers says, of two iterations and two evaluations, which its metrics.jsonl has.
    `made_here` gets its telemetry."""
    fleet, tracking = {"deadlines": {"tracking": deadline}}, {"trackers": list(trackers)}
    config = changed(made_runs.config(), fleet=fleet, tracking=tracking)

    async def run() -> tuple[str, ...]:
        made = Telemetry(config, RunFolder(path), WorldWithTrackers(**trackers))
        if made_here is not None:
            made_here.append(made)
        async with Tasks() as tasks:
            tasks.start(made.keep_writing(), "writing metrics")
            await made.resume([], [])
            tasks.start(made.tracking.keep(), "bringing metrics to trackers")
            first, _, last = made_runs.evaluations()
            made.evaluation(first, [])
            for number in range(2):
                made.iteration(made_runs.iteration(number))
                await asyncio.sleep(0.05)
            made.evaluation(last, [])
            await made.written()
            assert len((path / "metrics.jsonl").read_text().splitlines()) == 4
            await made.close()
        return made.progress().messages

    return asyncio.run(run())


ALL = ["base after 0", "iteration 0", "iteration 1", "ema after 3", "the end"]


def test_each_tracker_gets_every_record_in_order_and_is_closed(tmp_path: Path) -> None:
    one, other = Notes(), Notes()
    assert messages(tmp_path, wandb=lambda: one, trackio=lambda: other) == ()
    assert one.got == other.got == ALL


@pytest.mark.parametrize("opens", [False, True])
def test_a_tracker_that_fails_is_one_message_and_the_other_gets_everything(opens: bool, tmp_path: Path) -> None:
    def fails(what: str) -> None:
        if what == "iteration 0":
            raise OSError(28, "No space left on device")

    def made() -> Notes:
        if not opens:
            raise ValueError("No API key configured.\nUse `wandb login`.")
        return one

    one, other = Notes(fails), Notes()
    (said,) = messages(tmp_path, wandb=made, trackio=lambda: other)
    reason = "[Errno 28] No space left on device" if opens else "No API key configured."
    assert said == f"warning: wandb failed, and the run goes on without it: {reason}"
    assert one.got == (["base after 0"] if opens else [])
    assert other.got == ALL


def test_a_tracker_that_hangs_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    ever = threading.Event()
    one = Notes(lambda what: ever.wait() if what == "iteration 1" else None)  # type: ignore[arg-type,return-value]
    try:
        (said,) = messages(tmp_path, wandb=lambda: one, deadline=0.2)
    finally:
        ever.set()
    assert said.endswith("without it: writing to wandb (fleet.deadlines.tracking) passed its deadline of 0.2 s")


def test_what_a_slow_tracker_has_not_got_at_the_end_is_left(tmp_path: Path) -> None:
    """Each call takes less than the deadline, all of them together more."""
    slow = threading.Event()
    one = Notes(lambda _: slow.wait(0.25) and None)  # type: ignore[func-returns-value]
    (said,) = messages(tmp_path, wandb=lambda: one, deadline=0.5)
    assert said.endswith("without it: it had not finished 0.5 s (fleet.deadlines.tracking) after the end of the run")
    assert one.got[:2] == ALL[:2]


def test_a_run_is_done_when_its_trackers_are_and_says_before_whom_it_waits_for(tmp_path: Path) -> None:
    def fails(_: str) -> None:
        raise OSError(28, "No space left on device")

    run: list[Telemetry] = []
    ever, states = threading.Event(), []

    def hangs(what: str) -> None:
        if what == "the end":
            states.append(run[0].progress().state)
            ever.wait()

    try:
        messages(tmp_path, deadline=0.3, made_here=run, wandb=lambda: Notes(fails), trackio=lambda: Notes(hangs))
    finally:
        ever.set()
    assert states == ["bringing the last metrics to trackio"]  # wandb gets nothing any more
    assert run[0].progress().state == "done"


def test_without_trackers_there_is_nothing_of_them(tmp_path: Path) -> None:
    assert messages(tmp_path) == ()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "trace.json", "tensorboard"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["policy"] == "base"
