"""``solrl eval`` of a live run is done by the run, beside its update: the scores are the oracle's, and the run changes
by no byte."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from actors.evaluation.requests import EvaluationRequest, Found, RequestProgress

from actors.client import evaluate_live, launch
from actors.client.evaluate import EvalRequest
from actors.fleet.actor_factory import ActorClasses
from actors.workers.learner_rank import LearnerRank
from solrl_ray.cli import main
from solrl_ray.config.schema import Config
from solrl_ray.errors import RewardError
from solrl_ray.evaluation.held_out import policy_factors
from solrl_ray.learning.state import LearnerState
from solrl_ray.storage.run_folder import RunFolder
from solrl_ray.storage.warm_start import factor_shapes
from tests.support.patience import patience, wait_until
from tests.support.small import digests, small_config
from tests.system.test_evaluation import expected

GO = "go"
BRIGHTNESS = "rewards: [{kind: 'tests.system.rewards:brightness', weight: 3.0}]"


class Gated(LearnerRank):
    """Does not begin the second update before it is told to, by a file beside the run."""

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
def test_a_live_run_does_others_evaluations_beside_its_update_and_changes_by_no_byte(
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
    said = capsys.readouterr().out
    assert "4 of 4 prompts evaluated (2 for each of 2 policies)" in said
    assert "alone" not in said
    assert digests(config) == digests(calm)
    found = json.loads((out / "evaluation.json").read_text())
    assert (found["policies"], found["updates"]) == (["base", "ema"], 1)
    for policy in ("base", "ema"):
        assert found["scores"][policy] == expected(config, policy_factors(state, policy)), policy
    assert len(list((out / "ema").glob("*.png"))) == config.evaluation.samples  # of one prompt


@ray.remote(num_cpus=0)
class Run:
    """A controller, for those who ask it to evaluate. It is at work for one question more, or for ever."""

    def __init__(self, error: Callable[[], Exception] | None = None, found: Found | None = None) -> None:
        self._error, self._found = error, found
        self._asked: EvaluationRequest | None = None
        self._forgotten: list[str] = []

    def progress(self) -> None: ...

    def was_asked(self) -> bool:
        return self._asked is not None

    def submit_evaluation(self, request: EvaluationRequest) -> None:
        self._asked = request

    def poll_evaluation(self, name: str) -> RequestProgress | None:
        assert self._asked is not None
        if name != self._asked.name:
            return None
        error = self._error() if self._error is not None else None
        total = len(self._asked.prompts) * len(self._asked.publications)
        done = 0 if self._found is None else total
        return RequestProgress(done=done, total=total, error=error, found=self._found)  # type: ignore[arg-type]

    def forget_evaluation(self, name: str) -> None:
        self._forgotten.append(name)

    def seen(self) -> tuple[str, Mapping[str, str], list[str]]:
        """Name of the request, its policies with their revisions, and what was forgotten."""
        assert self._asked is not None
        publications = self._asked.publications
        return self._asked.name, {policy: each.name for policy, each in publications.items()}, self._forgotten


def asked(tmp_path: Path) -> tuple[Config, LearnerState, EvalRequest]:
    """Configuration, state and request of an evaluation of a run that has done three updates."""
    config = small_config(tmp_path, "asked")
    request = EvalRequest(run=RunFolder.of(config).path, out=tmp_path / "out", policies=("base", "ema"))
    factors = {name: torch.zeros(shape) for name, shape in factor_shapes(config).items()}
    named = {"default": factors, "old": factors, "ema": factors}
    return config, LearnerState(updates=3, steps=3, **named, exp_avg={}, exp_avg_sq={}), request


def evaluated(controller: Any, config: Config, state: LearnerState, request: EvalRequest) -> tuple[Any, list[str]]:
    """What an evaluation by this controller comes to, and what is said of it."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_live.live_run, "controller_of", lambda run: controller)
        return evaluate_live.evaluate(config, state, request, address="unused", tell=said.append), said


def test_what_the_run_could_not_evaluate_is_raised_where_it_was_asked_for_and_forgotten_by_the_run(
    local_ray: None, tmp_path: Path
) -> None:
    controller = Run.remote(lambda: RewardError("the reward has no tokenizer"))  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match=r"^the reward has no tokenizer$"):
        evaluated(controller, *asked(tmp_path))
    name, publications, forgotten = ray.get(controller.seen.remote(), timeout=patience())
    assert publications == {"base": "base-000003", "ema": "ema-000003"}
    assert forgotten == [name]
    with pytest.raises(RewardError):
        evaluated(controller, *asked(tmp_path))
    another, *_ = ray.get(controller.seen.remote(), timeout=patience())
    assert another != name, "two commands that write into the same folder are two requests"


def test_what_is_evaluated_is_counted_in_prompts_for_each_policy(local_ray: None, tmp_path: Path) -> None:
    scores: Found = {"base": {}, "ema": {}}
    controller = Run.remote(found=scores)  # type: ignore[attr-defined]
    found, said = evaluated(controller, *asked(tmp_path))
    assert found == scores
    assert said[-1] == "4 of 4 prompts evaluated (2 for each of 2 policies)"


def test_who_waits_for_a_run_that_ends_goes_on_alone(local_ray: None, tmp_path: Path) -> None:
    controller = Run.remote()  # type: ignore[attr-defined]
    ends = threading.Timer(0.0, lambda: end(controller))
    ends.start()
    found, said = evaluated(controller, *asked(tmp_path))
    assert found is None
    assert said[-1] == "the run ended before the evaluation; evaluating alone"


def end(controller: Any) -> None:
    """Once it was asked for an evaluation."""
    with suppress(AssertionError):
        wait_until("a request", lambda: ray.get(controller.was_asked.remote(), timeout=patience()))
    ray.kill(controller)


def test_a_run_that_is_not_live_or_gives_no_time_is_left_alone(
    local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, state, request = asked(tmp_path)
    assert evaluated(None, config, state, request) == (None, [])
    stingy = small_config(tmp_path, "stingy", "evaluation.share=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_live, "stored", lambda run: stingy)
        assert evaluate_live.page(config, state, request, address="unused") is None
    assert "(evaluation.share is 0); evaluating alone" in capsys.readouterr().out
