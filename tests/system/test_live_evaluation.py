"""``solrl eval`` of a live run borrows its regenerator: the scores are the oracle's, and the run changes by no byte."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import ray

from actors.client import launch
from actors.cluster.wait import WorkerGone
from actors.evaluation.finished_run import Request
from actors.evaluation.on_live_run import RunEnded, _Borrower
from actors.fleet.actor_factory import ActorClasses
from actors.workers.explorer import Explorer
from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.held_out import policy_factors
from solrl_ray.learning.state import LearnerState
from solrl_ray.records import Prompt, PromptEmbedding, UnitResult, WorkUnit
from solrl_ray.storage.run_folder import RunFolder
from tests.support.small import digests, small_config
from tests.system.test_evaluation import expected

PATIENCE = 400.0
GO = "go"


class Gated(Explorer):
    """Does not explore the second iteration before it is told to, by a file beside the run."""

    def explore(self, unit: WorkUnit, prompt: Prompt, embedding: PromptEmbedding) -> UnitResult:
        while unit.iteration == 1 and not (Path(self._config.run.root) / GO).exists():
            time.sleep(0.05)
        return super().explore(unit, prompt, embedding)


@pytest.mark.slow
def test_a_live_run_lends_its_regenerator_and_changes_by_no_byte(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "live", f"fleet.deadlines.explore={PATIENCE}")
    folder = RunFolder.of(config)
    train = threading.Thread(
        target=launch.train, args=(config,), kwargs={"live": False, "roles": ActorClasses(explorer=Gated)}, daemon=True
    )
    train.start()
    deadline = time.monotonic() + PATIENCE
    while 1 not in {updates for updates, _ in folder.checkpoints()}:
        assert train.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    state = LearnerState.load(folder.checkpoint(1))
    (tmp_path / "clip.yaml").write_text("rewards: [{kind: clipscore, path: 'builtin:testbed/reward'}]")
    (tmp_path / "more.yaml").write_text("rewards: [{kind: 'tests.system.rewards:brightness', weight: 3.0}]")
    files = [str(tmp_path / name) for name in ("clip.yaml", "more.yaml")]
    out = tmp_path / "out"
    arguments = ["--policies", "base,ema", "--rewards", *files, "--updates", "1", "--out", str(out), "--no-live"]
    try:
        assert main(["eval", str(folder.path), *arguments]) == 0
        assert train.is_alive()
    finally:
        (tmp_path / GO).touch()
    said = capsys.readouterr().out
    assert "4 of 4 units" in said
    assert "alone" not in said
    train.join(PATIENCE)
    assert digests(config) == digests(calm)
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["policies"], found["updates"]) == (["base", "ema"], 1)
    for policy in ("base", "ema"):
        assert found["scores"][policy] == expected(config, policy_factors(state, policy)), policy
    assert len(list((out / "ema").glob("*.png"))) == config.evaluation.samples  # of one prompt


@ray.remote(num_cpus=0)
class Lending:
    """A controller, for who borrows from it."""

    def renew(self, request: str) -> None:
        pass


def test_who_merges_on_the_cluster_of_a_run_that_ends_goes_on_alone(local_ray: None, tmp_path: Path) -> None:
    config = small_config(tmp_path, "ending", "fleet.deadlines.start=0.001")  # as if the merger's node were gone
    request = Request(run=RunFolder.of(config).path, out=tmp_path / "out", policies=("base",))
    controller, state = (
        Lending.remote(),
        LearnerState(updates=0, steps=0, default={}, old={}, ema={}, exp_avg={}, exp_avg_sq={}),
    )
    borrower = _Borrower(config, state, request, controller, print)
    with pytest.raises(WorkerGone, match="the start of the merger failed"):
        borrower._merged()
    ray.kill(controller)
    with pytest.raises(RunEnded):
        borrower._merged()
