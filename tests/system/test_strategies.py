"""Rollouts in one stage on a real Ray: what they learn from is what the chosen seeds give, whatever the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.client import launch
from actors.fleet.actor_factory import ActorClasses
from actors.workers.learner_rank import LearnerRank
from solrl_ray import models, rewards
from solrl_ray.config.schema import Config
from solrl_ray.prompts.prompt_set import choose, read_prompts
from solrl_ray.records import Prompt, PromptEmbedding, WorkUnit
from solrl_ray.report.data import read_run
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.storage.run_folder import RunFolder
from tests.support.small import digests, folder, small_config, summary

pytestmark = pytest.mark.usefixtures("local_ray")

SCALED = ("run.iterations=2", "rollout.strategy=scaled")


class Records(LearnerRank):
    """Keeps what it is given to learn from in iteration 0, beside the run's folder."""

    def feed(self, iteration: int, groups: list[Any], embeddings: list[Any]) -> None:
        super().feed(iteration, groups, embeddings)
        if iteration == 0:
            for group in self._joined._opened().groups:
                RunFolder(Path(self._config.run.root) / "learned").save_group(group)


def train(root: Path, name: str, *overrides: str, roles: ActorClasses | None = None) -> Config:
    config = small_config(root, name, *overrides)
    launch.train(config, live=False, classes=roles)
    return config


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Config:
    return train(tmp_path_factory.mktemp("scaled"), "scaled", *SCALED, roles=ActorClasses(learner=Records))


@pytest.mark.slow
def test_scaled_learns_from_the_extremes_of_the_pool_as_regenerating_them_gives_them(scaled: Config) -> None:
    """What the learner got in iteration 0, whose policy is the base model, against drawing each pool here."""
    run, rollout = RunFolder(Path(scaled.run.root) / "learned"), scaled.rollout
    torch.set_num_threads(scaled.fleet.explorers.threads)
    model = models.load(scaled.model, "cpu", components={"text", "transformer", "vae"})
    sample = Sampler(scaled, model, rewards.load(scaled.rewards, "cpu"), steps=4, micro_batch=4)
    for prompt in choose(read_prompts(scaled.prompts.train), scaled.run.seed, 0, rollout.prompts):
        embedding = PromptEmbedding(prompt_id=prompt.id, tensors=model.encode([prompt.text])[0], digest="")

        def draw(*indices: int, prompt: Prompt = prompt, embedding: PromptEmbedding = embedding) -> Any:
            unit = WorkUnit(stage="regenerate", iteration=0, revision=0, prompt_id=prompt.id, indices=indices)
            return sample(unit, prompt, embedding)

        pool = draw(*range(8)).rewards
        ranked = sorted(range(8), key=lambda i: (-pool[i], i))
        chosen = (*ranked[:2], *ranked[:-3:-1])
        group = run.load_group(0, prompt.id)
        assert group.indices == chosen
        again = draw(*chosen)
        assert group.rewards == again.rewards == tuple(pool[i] for i in chosen)
        assert torch.equal(group.latents, again.latents)


def test_direct_trains_on_every_seed_and_the_transitions_it_was_sampled_by_with_one_explorer_and_with_two(
    tmp_path: Path,
) -> None:
    direct = (
        "run.iterations=2",
        "rollout.strategy=direct",
        "rollout.pool=4",
        "rollout.sampler={kind: flow_sde}",
        "objective={kind: flow_grpo}",
    )
    one = train(tmp_path, "one", *direct)
    two = train(tmp_path, "two", *direct, "fleet.explorers.count=2")
    assert digests(one) == digests(two)
    assert [record.first_ratio_deviation for record in read_run(folder(one)).iterations] == [0.0, 0.0]
    assert summary(one)["candidates"] == summary(one)["samples"] == 2 * 3 * 4
    stored = list((folder(one) / "samples").glob("*/*.safetensors"))
    assert len(stored) == 3  # of the last iteration; checkpoints contain the others
    for path in stored:
        group = RunFolder(folder(one)).load_group(int(path.parent.name[-6:]), path.stem)
        assert sorted(group.indices) == [0, 1, 2, 3]
        assert group.trajectory is not None


def test_quantized_warns_wherever_its_results_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = train(
        tmp_path,
        "bad",
        *("run.iterations=1", "rollout.prompts=1"),
        *("rollout.strategy=quantized", "rollout.accept_quantized_training=true"),
    )
    warning = "Trained on quantised samples: rollout.strategy quantized trains directly on the nvfp4-emulated samples"
    assert f"warning: {warning}" in " ".join(capsys.readouterr().out.split())
    assert summary(config)["warnings"][0].startswith(warning)
    page = (folder(config) / "report.html").read_text()
    assert page.index(warning) < page.index("Held-out reward")
    tiers = {a.worker: a.tier for a in read_run(folder(config)).attestations}
    assert tiers == {"explorer-0": "nvfp4-emulated", "regenerator-0": "float32"}
