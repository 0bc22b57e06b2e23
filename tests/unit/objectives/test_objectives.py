"""Every method as shipped: rolled out, selected, replayed and trained on, with a tiny checkpoint.

Whole runs of every family with every method are in `tests/unit/models/test_whole_runs.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from solrl_ray import models
from solrl_ray.config.checks import check
from solrl_ray.config.loading import load
from solrl_ray.config.samplers import Ode
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.learning.learner import Learner
from solrl_ray.learning.update_metrics import UpdateMetrics
from solrl_ray.objectives.base import MicroBatch
from solrl_ray.planning.update import backwards, forwards_without_gradient
from solrl_ray.policy import adapters
from solrl_ray.records import Address, Prompt, PromptEmbedding, SampleGroup, Trajectory, WorkUnit
from solrl_ray.rewards.base import Reward
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.sampling import sde
from solrl_ray.sampling.noise import initial_noise
from solrl_ray.sampling.schedules import sigmas
from tests.support.tiny import model_config

pytestmark = pytest.mark.usefixtures("group_of_one")
CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = (
    "rollout={prompts: 2, pool: 4, keep: 2}",
    "rollout.explore={steps: 2, micro_batch: 4, precision: float32}",
    "rollout.preview.prune=null",  # previews of two steps are finished after two
    "rollout.regenerate={steps: 4, micro_batch: 2}",
    "learner={micro_batch: 2, optimizer: {lr: 1e-2}}",
)
OWN: dict[str, tuple[str, ...]] = {
    "sol_rl": ("learner.updates=1",),
    "awm": ("objective.timesteps=2",),
    "flow_grpo": (),
    "flow_grpo_fast": ("rollout.sampler.window={size: 2, range: [0, 3]}", "rollout.explore.steps=4"),
    "dance_grpo": ("learner.updates=2",),
}
STOCHASTIC = [method for method in OWN if "grpo" in method]
PROMPTS = [Prompt(id="p", text="a red square"), Prompt(id="q", text="two blue circles")]


class Redness(Reward):
    def compute(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2))


def settings(method: str, folder: Path, *changes: str) -> Config:
    """A shipped method, made small."""
    files = [CONFIGS / "demo.yaml", CONFIGS / "methods" / f"{method}.yaml"]
    made = load(files, [*SMALL, *OWN[method], *changes])
    check(made)
    return made.model_copy(update={"model": model_config(folder, schedule=made.model.schedule)})


class Bench:
    """A learner and samplers that share its model: the sampling policy is its ``old`` adapter."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = models.load(config.model, "cpu", components={"text", "transformer", "vae"})
        self.learner = Learner(config, self.model, 0, 1)
        full, preview, reward = config.rollout.regenerate, config.rollout.explore, Redness("redness")
        self.preview = Sampler(config, self.model, reward, steps=preview.steps, micro_batch=preview.micro_batch)
        shape = {"steps": full.steps, "micro_batch": full.micro_batch}
        self.full = Sampler(config, self.model, reward, **shape, record=config.objective.needs_trajectory)
        self.embeddings = {
            p.id: PromptEmbedding(prompt_id=p.id, tensors=self.model.encode([p.text])[0], digest=p.id) for p in PROMPTS
        }

    def draw(self, sampler: Sampler, iteration: int, prompt: Prompt, indices: Sequence[int]) -> Any:
        unit = WorkUnit(
            stage="regenerate", iteration=iteration, revision=iteration, prompt_id=prompt.id, indices=tuple(indices)
        )
        with adapters.using(self.model.transformer, "old"):
            return sampler(unit, prompt, self.embeddings[prompt.id])

    def group(self, iteration: int, prompt: Prompt) -> SampleGroup:
        """Preview the pool, keep best and worst, replay them."""
        proxy = torch.tensor(self.draw(self.preview, iteration, prompt, range(self.config.rollout.pool)).rewards)
        chosen = (int(proxy.argmax()), int(proxy.argmin()))
        sampled = self.draw(self.full, iteration, prompt, chosen)
        return SampleGroup(
            iteration=iteration,
            revision=iteration,
            prompt_id=prompt.id,
            indices=chosen,
            rewards=sampled.rewards,
            latents=sampled.latents,
            trajectory=sampled.trajectory,
        )

    def iterate(self, iteration: int) -> UpdateMetrics:
        groups = [self.group(iteration, prompt) for prompt in PROMPTS]
        return self.learner.update(iteration, groups, self.embeddings)


@pytest.fixture
def bench(tiny_pipeline: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(method: str, *changes: str) -> Bench:
        made.append(Bench(settings(method, tiny_pipeline, *changes)))
        return made[-1]

    yield build
    for one in made:
        one.learner.close()


@pytest.mark.parametrize("method", OWN)
def test_three_iterations_train_the_policy(bench: Callable[..., Bench], method: str) -> None:
    one = bench(method)
    before = one.learner.factors("default")
    metrics = [one.iterate(iteration) for iteration in range(3)]
    after = one.learner.factors("default")
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert all(not torch.equal(after[name], before[name]) for name in before if name.endswith("lora_B"))
    state = one.learner.state()
    assert (state.updates, state.steps) == (3, 3 * one.config.learner.updates)
    for m in metrics:
        assert np.isfinite([m.loss, m.policy_loss, m.kl, m.gradient_norm]).all()
        assert m.gradient_norm > 0
        assert m.first_ratio_deviation == (None if method == "sol_rl" else 0.0)
        if one.config.learner.updates == 2:
            assert m.ratio_deviation is not None
            assert m.ratio_deviation > 0


@pytest.mark.parametrize("kl", ["0", "1e-3"])
@pytest.mark.parametrize("method", ["sol_rl", "awm", "flow_grpo", "dance_grpo"])
def test_an_update_makes_the_forwards_that_the_plan_counts_and_none_of_the_reference_without_kl(
    bench: Callable[..., Bench], method: str, kl: str
) -> None:
    own = ("objective.clip_range=0.1", "objective.old_decay.kind=copy") if method == "sol_rl" else ()
    own += () if method == "dance_grpo" else (f"objective.kl={kl}",)
    levels = "objective.timesteps=1" if method == "awm" else "learner.updates=2"
    one = bench(method, *own, levels, "learner.epochs=2", "objective.step_range=[0, 2]")
    one.iterate(0)  # so that no policy is another's copy
    forwards: list[str] = []
    transformer = one.model.transformer
    hook = transformer.register_forward_hook(lambda *_: forwards.append(adapters.active_adapter(transformer)))
    groups = [one.group(1, prompt) for prompt in PROMPTS]
    forwards.clear()
    metrics = one.learner.update(1, groups, one.embeddings)
    hook.remove()
    assert forwards.count("default") == backwards(one.config) == metrics.passes
    assert len(forwards) - forwards.count("default") == forwards_without_gradient(one.config) > 0
    assert bool(forwards.count("base")) == bool(one.config.objective.kl)
    assert one.learner.state().steps == 2 * one.config.learner.optimizer_steps


@pytest.mark.parametrize("method", STOCHASTIC)
def test_a_stored_transition_holds_exactly_the_addressed_noise(bench: Callable[..., Bench], method: str) -> None:
    """What the learner takes for mean and standard deviation is what the sampler made the states with."""
    one = bench(method)
    one.iterate(0)  # B is no longer zero
    group = one.group(1, PROMPTS[0])
    path = group.trajectory
    assert path is not None
    batch = MicroBatch(
        prompt_ids=("p", "p"),
        indices=group.indices,
        x0=group.latents,
        weights=torch.ones(2),
        states=path.states,
        first_steps=(path.first_step,) * 2,
    )
    embedding = one.model.batch_embeddings([one.embeddings["p"]] * 2)
    grid = sigmas(one.config.model.schedule, 4, one.model.image_tokens).tolist()
    sampler = one.config.rollout.sampler
    assert not isinstance(sampler, Ode)
    for k, step in enumerate(range(path.first_step, path.first_step + path.states.shape[1] - 1)):
        with torch.no_grad(), adapters.using(one.model.transformer, "old"):
            v = one.model.velocity(path.states[:, k], grid[step], embedding)
        move = sde.transition(sampler, grid, step)
        mean = move.x_weight * path.states[:, k] + move.v_weight * v
        where = Address(run_seed=one.config.run.seed, purpose="sde-increment", iteration=1, prompt_id="p", step=step)
        normals = initial_noise([dataclasses.replace(where, index=i) for i in group.indices], one.model.latent_shape)
        torch.testing.assert_close((path.states[:, k + 1] - mean) / move.std, normals, rtol=1e-4, atol=1e-4)
    passes = one.learner._objectives[None].passes(batch, torch.device("cpu"), 1)
    assert {float(t) for p in passes for t in p.t} <= {float(np.float32(sigma)) for sigma in grid}


@pytest.mark.parametrize("method", STOCHASTIC)
def test_a_sample_is_replayed_to_the_bit_in_other_company(bench: Callable[..., Bench], method: str) -> None:
    one = bench(method)
    alone = one.draw(one.full, 2, PROMPTS[1], (3, 1))
    others = one.draw(one.full, 2, PROMPTS[1], (0, 2, 3, 1))
    assert torch.equal(alone.latents, others.latents[2:])
    assert torch.equal(alone.trajectory.states, others.trajectory.states[2:])
    assert len({float(latent.sum()) for latent in others.latents}) == 4


def test_samples_that_lost_their_trajectory_are_refused(bench: Callable[..., Bench]) -> None:
    one = bench("flow_grpo")
    groups = [one.group(0, prompt) for prompt in PROMPTS]
    path = groups[1].trajectory
    assert path is not None
    for broken, message in (
        (None, "prompt q in iteration 0 came without the trajectories"),
        (Trajectory(states=path.states[:, :-1], first_step=0), r"prompt q .* have trajectories .*\(2, 3, "),
        (Trajectory(states=path.states * float("nan"), first_step=0), "prompt q .* not finite"),
    ):
        with pytest.raises(RunError, match=message):
            one.learner.update(0, [groups[0], dataclasses.replace(groups[1], trajectory=broken)], one.embeddings)
