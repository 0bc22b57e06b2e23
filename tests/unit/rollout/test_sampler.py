"""Where the noise of a unit's samples is addressed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from solrl_ray.config.samplers import FlowSde, Window
from solrl_ray.records import Address, SampleShape, WorkUnit
from solrl_ray.rollout.sampler import Sampler, addresses, window_start
from solrl_ray.sampling.noise import initial_noise
from tests.support import made_runs
from tests.support.made_configs import changed

UNIT = WorkUnit(stage="explore", iteration=3, revision=3, prompt_id="p", indices=(4, 5))


def test_explored_and_regenerated_samples_share_their_noise_and_evaluation_has_its_own() -> None:
    wanted = [Address(run_seed=7, purpose="initial-noise", iteration=3, prompt_id="p", index=i) for i in (4, 5)]
    assert addresses(UNIT, 7) == addresses(replace(UNIT, stage="regenerate"), 7) == wanted
    evaluated = addresses(replace(UNIT, stage="evaluate"), 7)
    assert evaluated == [replace(address, purpose="evaluation-noise", iteration=0) for address in wanted]


def test_a_prompts_candidates_share_their_noise_only_if_that_is_asked_for() -> None:
    own, shared = addresses(UNIT, 7, FlowSde()), addresses(UNIT, 7, FlowSde(shared_noise=True))
    assert own[0] != own[1]
    assert shared[0] == shared[1]


def test_a_prompts_candidates_share_their_window() -> None:
    sampler = FlowSde(window=Window(size=2, range=(1, 6)))
    starts = {window_start(sampler, replace(UNIT, iteration=i), 7) for i in range(200)}
    assert starts == {1, 2, 3, 4}
    assert window_start(sampler, UNIT, 7) == window_start(sampler, replace(UNIT, indices=(0,)), 7)
    assert {window_start(sampler, replace(UNIT, prompt_id=str(i)), 7) for i in range(200)} == starts
    assert {window_start(sampler, UNIT, seed) for seed in range(200)} == starts
    assert window_start(FlowSde(), UNIT, 7) == 0


def test_the_noise_of_a_step_has_an_address_of_its_own_for_every_seed_iteration_prompt_index_and_step() -> None:
    """Noise that all prompts share leaves every other property of a trajectory as it is."""
    config, shape = made_runs.config(), (2, 3)
    model: Any = SimpleNamespace(latent_shape=shape, device="cpu", shape=SampleShape(8, 8))

    def noise(step: int = 5, seed: int = 7, **unit: Any) -> torch.Tensor:
        seeded = changed(config, run={"seed": seed})
        sampler = Sampler(seeded, model, cast(Any, None), steps=6, micro_batch=2)
        return sampler._increment(replace(UNIT, **unit), step)

    wanted = Address(run_seed=7, purpose="sde-increment", iteration=3, prompt_id="p", step=5)
    assert torch.equal(noise(), initial_noise([replace(wanted, index=4), replace(wanted, index=5)], shape))
    assert torch.equal(noise(stage="regenerate", revision=9), noise())
    other = [noise(), noise(4), noise(seed=8), noise(prompt_id="q"), noise(iteration=4), noise(indices=(6, 7))]
    assert len({tuple(row.flatten().tolist()) for each in other for row in each}) == 2 * 6
