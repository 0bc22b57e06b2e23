"""``solrl eval`` of a run that goes on: it has workers of its own. The scores are the oracle's, and the run changes by
no byte.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.learner_rank import LearnerRank
from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from solrl_ray.evaluation.held_out import policy_factors
from solrl_ray.learning.state import LearnerState
from solrl_ray.storage.run_folder import RunFolder
from tests.support.patience import patience, wait_until
from tests.support.small import digests, small_config
from tests.system.test_evaluation import expected

GO = "go"
BRIGHTNESS = "rewards: [{kind: 'tests.system.rewards:brightness', weight: 3.0}]"


class Gated(LearnerRank):
    """Does not begin the second update before a file beside the run exists."""

    def update(self, iteration: int) -> Any:
        while iteration == 1 and not (Path(self._config.run.root) / GO).exists():
            time.sleep(0.05)
        return super().update(iteration)


class LiveRun:
    """A run in a thread, which waits in its second update."""

    def __init__(self, config: Config) -> None:
        self._config = config
        keywords = {"live": False, "classes": ActorClasses(learner=Gated)}
        self._train = threading.Thread(target=launch.train, args=(config,), kwargs=keywords, daemon=True)
        self._train.start()

        def saved() -> bool:
            assert self.goes_on
            return 1 in {updates for updates, _ in RunFolder.of(config).checkpoints()}

        wait_until("the first checkpoint", saved)

    @property
    def goes_on(self) -> bool:
        return self._train.is_alive()

    def finish(self) -> None:
        (Path(self._config.run.root) / GO).touch()
        self._train.join(patience(400.0))


@pytest.mark.slow
def test_a_run_is_evaluated_while_it_goes_on_and_changes_by_no_byte(
    calm: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "live", "rollout.explore.precision=auto")
    folder, out = RunFolder.of(config), tmp_path / "out"
    (tmp_path / "clip.yaml").write_text("rewards: [{kind: clipscore, path: 'builtin:testbed/reward'}]")
    (tmp_path / "more.yaml").write_text(BRIGHTNESS)
    (tmp_path / "nan.yaml").write_text("rewards: [{kind: 'tests.system.rewards:nan'}]")
    files = [str(tmp_path / name) for name in ("clip.yaml", "more.yaml")]
    arguments = ["--policies", "base,ema", "--rewards", *files, "--updates", "1", "--out", str(out), "--no-live"]
    run = LiveRun(config)
    state = LearnerState.load(folder.checkpoint(1))
    try:
        broken = ["--policies", "ema", "--rewards", str(tmp_path / "nan.yaml"), "--out", str(tmp_path / "no")]
        assert main(["eval", str(folder.path), *broken, "--no-live"]) == 1
        assert "tests.system.rewards:nan" in capsys.readouterr().err
        assert main(["eval", str(folder.path), *arguments]) == 0
        assert run.goes_on
    finally:
        run.finish()
    assert not run.goes_on
    assert digests(config) == digests(calm)
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["policies"], found["updates"]) == (["base", "ema"], 1)
    for policy in ("base", "ema"):
        assert found["scores"][policy] == expected(config, policy_factors(state, policy)), policy
    assert len(list((out / "ema").glob("*.png"))) == config.evaluation.samples  # of one prompt
