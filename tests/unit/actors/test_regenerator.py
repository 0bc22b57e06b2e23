"""What a regenerator keeps for an evaluation that is asked for from outside, and until when."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.workers import regenerator
from actors.workers.regenerator import Regenerator
from actors.workers.sampling_worker import SamplingWorker
from solrl_ray.config.schema import Config
from solrl_ray.errors import RewardError
from solrl_ray.records import Prompt, PromptEmbedding, Receipt, WorkUnit
from tests.support.small import small_config

PROMPT, EMBEDDING = Prompt(id="p", text="a red ring"), PromptEmbedding(prompt_id="p", tensors={}, digest="")
UNIT = WorkUnit(stage="evaluate", iteration=1, revision=1, prompt_id="p", indices=(0,), policy="ema")


def receipt(policy: str) -> Receipt:
    return Receipt(
        worker="regenerator-0",
        role="regenerator",
        revision=1,
        score_class="",
        policy=policy,
        bound_modules=1,
        buffer_digest="",
        probe_digest="",
    )


class Loads:
    """Counts what is loaded; a sampler scores 0.5 by its rewards, if it does not fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.error = 0, ""
        monkeypatch.setattr(regenerator.rewards, "load", self.load)
        monkeypatch.setattr(regenerator, "Columns", lambda mixture: SimpleNamespace(last=((0.5,),)))
        monkeypatch.setattr(
            regenerator, "evaluating", lambda config, model, columns: SimpleNamespace(evaluate=self.sample)
        )

    def load(self, *_: Any) -> None:
        self.count += 1

    def sample(self, unit: WorkUnit, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> Any:
        if self.error:
            raise RewardError(self.error)
        images, components = torch.zeros(1, 3, 2, 2), torch.empty(1, 0)
        return SimpleNamespace(rewards=torch.tensor([0.5]), components=components, images=images, reward_costs={})


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path, "run")


@pytest.fixture
def worker(config: Config, monkeypatch: pytest.MonkeyPatch) -> Regenerator:
    """One that has started, and holds the policy that it is asked for."""
    made = Regenerator("regenerator-0", config)
    made._device, made._model, made._score_class = "cpu", None, ""  # type: ignore[assignment]
    made._holds = (UNIT.policy, UNIT.revision)
    monkeypatch.setattr(SamplingWorker, "load_revision", lambda _, content, probe, full: receipt(content.decode()))
    return made


def score(worker: Regenerator, config: Config) -> tuple[tuple[float, ...], ...]:
    return worker.score(config, UNIT, [PROMPT], 0, EMBEDDING).columns


def test_rewards_from_outside_are_loaded_once_for_all_policies_and_go_when_the_run_goes_on(
    worker: Regenerator, config: Config, loads: Loads
) -> None:
    assert score(worker, config) == ((0.5,),)
    worker.load_revision(b"ema", EMBEDDING, False)
    score(worker, config)
    assert loads.count == 1
    other = config.model_copy(update={"rewards": []})
    score(worker, other)
    assert loads.count == 2
    worker.load_revision(b"old", EMBEDDING, False)
    assert worker._outside is None
    score(worker, other)
    assert loads.count == 3


def test_rewards_from_outside_that_fail_leave_nothing_behind(worker: Regenerator, config: Config, loads: Loads) -> None:
    score(worker, config)
    loads.error = "no room for its network"
    with pytest.raises(RewardError, match="no room for its network"):
        score(worker, config)
    assert worker._outside is None


def test_an_answer_for_several_prompts_has_for_each_its_own_part_and_carries_no_other_pictures(
    worker: Regenerator,
) -> None:
    prompts = [Prompt(id=name, text="") for name in "pqr"]
    embeddings = [replace(EMBEDDING, prompt_id=prompt.id) for prompt in prompts]
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 64, 64).contiguous()
    sampled = SimpleNamespace(
        rewards=torch.arange(6.0), components=torch.empty(6, 0), images=images, reward_costs={"questions": 6}
    )
    worker._evaluate = SimpleNamespace(evaluate=lambda *_: sampled)  # type: ignore[assignment]
    unit = replace(UNIT, indices=(0, 1), beside=("q", "r"))
    sent = pickle.dumps(worker.evaluate(unit, prompts, 2, *embeddings))
    found = pickle.loads(sent)
    assert found.unit == unit
    parts = [found, *found.beside]
    assert [part.unit.prompt_id for part in parts] == ["p", "q", "r"]
    assert [part.rewards for part in parts] == [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    assert [part.reward_costs for part in parts] == [{"questions": 6}, {}, {}]
    pictured = [part.images for part in parts]
    assert [images is None for images in pictured] == [False, False, True]
    assert [images[:, 0, 0, 0].tolist() for images in pictured[:2]] == [[0, 1], [2, 3]]
    assert len(sent) < 5 * images[0].nbytes  # four are asked for
