"""Exploring one iteration ahead: the oracle's bytes, a true overlap, and a resume inside of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from actors.client import launch
from actors.client.controller_actor import ControllerActor
from actors.fleet.actor_factory import ActorClasses
from actors.training.checkpoints import CheckpointWriter
from actors.workers.explorer import Explorer
from actors.workers.learner_rank import LearnerRank
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.state import LearnerState
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.metrics.records import measured_seconds
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.report.data import read_run
from solrl_ray.report.trace import Span
from solrl_ray.storage.run_folder import RunFolder
from tests import oracle
from tests.support.patience import wait_until
from tests.support.small import digests, folder, small_config, summary
from tests.support.spans import ended, read_spans

AHEAD_OF = "journal/iteration-000002.jsonl"
GONE = r"^the controller is gone: .*; go on with: solrl train --resume \S+$"
AHEAD = ("rollout.max_staleness=1", "fleet.explorers.count=2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Digests of the oracle, exploring with the revision before."""
    threads = torch.get_num_threads()
    result = oracle.run(small_config(tmp_path_factory.mktemp("oracle"), "oracle", *AHEAD), iterations=3)
    torch.set_num_threads(threads)
    return result.selection_digest, result.lora_digest


class DiesAhead(Explorer):
    """Once, in a preview of iteration 2, whose revision 1 is no longer the newest when it is begun again."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        mark = Path(self._config.run.root) / "died"
        if unit.iteration == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().explore(unit, prompt, embedding)


class WaitsForTheEvaluation(LearnerRank):
    """Its update of iteration 2 does not end before what two updates made is evaluated."""

    def update(self, iteration: int) -> UpdateMetrics:
        if iteration == 2:
            record = RunFolder.of(self._config).evaluations / "updates-000002-ema"
            wait_until("an evaluation beside the update", record.exists)
        return super().update(iteration)


@pytest.fixture(scope="module")
def ahead(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = small_config(tmp_path_factory.mktemp("ahead"), "ahead", *AHEAD, "evaluation.every=2")
    launch.train(config, live=False, classes=ActorClasses(explorer=DiesAhead, learner=WaitsForTheEvaluation))
    return config


def units(config: Config, stage: str, iteration: int) -> list[Span]:
    spans = read_spans(folder(config))
    return [s for s in spans if s.kind == "unit" and (s.stage, s.iteration) == (stage, iteration)]


def test_exploring_ahead_selects_and_learns_the_bytes_of_the_oracle_whoever_dies(
    ahead: Config, expected: tuple[str, str]
) -> None:
    assert (Path(ahead.run.root) / "died").exists()
    assert summary(ahead)["requeued_units"] >= 1
    assert digests(ahead) == expected


def test_the_next_iteration_is_explored_while_the_present_one_is_learned_from(ahead: Config) -> None:
    learned = {s.iteration: s for s in read_spans(folder(ahead)) if s.stage == "learn"}
    for iteration in (0, 1):
        previews = units(ahead, "explore", iteration + 1)
        assert min(s.started for s in previews) < ended(learned[iteration])
        assert max(ended(s) for s in units(ahead, "explore", iteration)) <= min(s.started for s in previews)
        # What is learned from is sampled with the revision that this update made.
        assert min(s.started for s in units(ahead, "regenerate", iteration + 1)) > ended(learned[iteration])
    assert not units(ahead, "explore", 3)


def test_its_metrics_say_how_far_behind_explorers_were(ahead: Config) -> None:
    records = [json.loads(line) for line in folder(ahead).joinpath("metrics.jsonl").read_text().splitlines()]
    iterations = [r for r in records if r["event"] == "iteration"]
    assert [(r["revision"], r["staleness"]) for r in iterations] == [(0, 0), (1, 1), (2, 1)]
    for record in iterations:
        seconds = record["seconds"]
        parts = ("explore", "learn", "publish")  # follow one another; regenerating and the checkpoint overlap
        assert sum(seconds[part] for part in parts) <= seconds["total"] + 0.1
        assert ("ahead" in seconds) == (record["staleness"] == 1)


def test_an_evaluation_on_the_way_goes_on_beside_the_next_update_and_is_part_of_its_time(ahead: Config) -> None:
    run = read_run(folder(ahead))
    assert [e.iteration for e in run.evaluations if e.overlapped] == [2]
    alone = sum(e.seconds for e in run.evaluations if not e.overlapped)
    assert measured_seconds(run.iterations, run.evaluations) == alone + sum(r.seconds["total"] for r in run.iterations)
    assert run.iterations[2].seconds["total"] > next(e.seconds for e in run.evaluations if e.overlapped)


class DiesWithItsCheckpoint(ControllerActor):
    """When revision 2 is published, and samples were made with it, but what it was made from is not on the disk."""

    def __init__(self, config: Config, run: Path, classes: ActorClasses) -> None:
        write = CheckpointWriter._write

        def dies(self: CheckpointWriter, state: LearnerState, updates: int) -> None:
            if updates == 2:
                wait_until("samples of iteration 2", lambda: sampled(run))
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, state, updates)

        CheckpointWriter._write = dies  # type: ignore[method-assign]  # of this process, which ends with it
        super().__init__(config, run, classes)


def sampled(run: Path) -> list[Path]:
    """What there is to learn from in iteration 2; made with revision 2."""
    return list((run / "samples/iteration-000002").glob("*.safetensors"))


def test_a_controller_killed_before_a_checkpoint_resumes_to_the_same_bytes_with_what_was_explored_ahead(
    local_ray: None, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, "killed", *AHEAD)
    run = folder(config)
    monkeypatch.setattr(launch, "ControllerActor", DiesWithItsCheckpoint)
    with pytest.raises(RunError, match=GONE):
        launch.train(config, live=False)
    before = (run / AHEAD_OF).read_bytes()
    assert before.count(b"\n") >= 3
    assert sampled(run)
    assert not (run / "checkpoints/iteration-000002").exists()
    monkeypatch.undo()
    launch.train(config, live=False, resume=True)
    assert digests(config) == expected
    assert (run / AHEAD_OF).read_bytes().startswith(before[: before.rindex(b"\n") + 1])
