"""Where the noise of a unit's samples is addressed."""

from __future__ import annotations

from dataclasses import replace

from solrl_ray.config.samplers import FlowSde, Window
from solrl_ray.records import Address, WorkUnit
from solrl_ray.rollout.sampler import addresses, window_start

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
    assert window_start(FlowSde(), UNIT, 7) == 0
