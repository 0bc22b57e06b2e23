"""Flow-GRPO and DanceGRPO: ratios of stored transitions, their clip, their KL, and which transitions are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from solrl_ray.config import objectives as sections
from solrl_ray.config.samplers import Cps, DanceSde, FlowSde, Stochastic, Window
from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.objectives.base import MicroBatch, Velocities, clipped_surrogate
from solrl_ray.objectives.grpo import DanceGrpo, FlowGrpo, TransitionPass
from solrl_ray.records import Address
from solrl_ray.sampling import sde
from solrl_ray.sampling.noise import permutation
from solrl_ray.sampling.schedules import sigmas
from tests.support.tensors import randn as noise

GRID = sigmas(SigmaSchedule(kind="linear"), 8, 16)
CPU = torch.device("cpu")
SAMPLERS: list[Stochastic] = [FlowSde(), DanceSde(), Cps()]


def batch(transitions: int, first_steps: tuple[int, ...] = (0, 0, 0)) -> MicroBatch:
    """Three samples of latents [4, 2]; state i of sample b is recognisable as 100 b + i."""
    states = torch.stack(
        [torch.stack([torch.full((4, 2), 100.0 * b + i) for i in range(transitions + 1)]) for b in range(3)]
    )
    return MicroBatch(
        prompt_ids=("p", "p", "q"),
        indices=(4, 9, 2),
        x0=states[:, -1],
        weights=torch.ones(3),
        states=states,
        first_steps=first_steps,
    )


def a_pass(sampler: Stochastic, step: int = 3) -> TransitionPass:
    moves = [sde.transition(sampler, GRID.tolist(), step)] * 3
    return TransitionPass(
        x_t=noise(3, 4, 2, seed=1),
        t=torch.full((3,), float(GRID[step])),
        x_next=noise(3, 4, 2, seed=2),
        coefficients=sde.Coefficients.of(moves, CPU, torch.float32),
    )


def flow(sampler: Stochastic, **keys: Any) -> FlowGrpo:
    return FlowGrpo(sections.FlowGrpoConfig(**keys), sampler=sampler, grid=GRID, run_seed=5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.kind)
def test_the_ratio_of_an_unchanged_policy_is_exactly_one_and_its_gradient_is_reinforce(sampler: Stochastic) -> None:
    v = noise(3, 4, 2, seed=3).requires_grad_()
    one, gains = a_pass(sampler), torch.tensor([1.0, -2.0, 9.0], dtype=torch.float64)
    loss = flow(sampler).loss(one, Velocities(theta=v, old=v.detach()), gains)
    assert loss.ratio is not None
    assert loss.clipped is not None
    assert loss.ratio.tolist() == [1.0, 1.0, 1.0]
    assert loss.clipped.tolist() == [0.0, 0.0, 0.0]
    found = torch.autograd.grad(loss.total.sum(), v)[0]
    logp = sde.log_probability(one.coefficients, one.x_next, sde.mean(one.coefficients, one.x_t, v))
    expected = torch.autograd.grad((-torch.tensor([1.0, -2.0, 5.0]) * logp).sum(), v)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.kind)
def test_the_ratio_is_that_of_mean_log_densities(sampler: Stochastic) -> None:
    one, v, v_old = a_pass(sampler), noise(3, 4, 2, seed=3), noise(3, 4, 2, seed=4)
    given = Velocities(theta=v, old=v_old)
    loss = flow(sampler).loss(one, given, torch.ones(3, dtype=torch.float64))
    move = sde.transition(sampler, GRID.tolist(), 3)
    expected = []
    for b in range(3):
        logp = []
        for velocity in (v, v_old):
            mean = move.x_weight * one.x_t[b].double() + move.v_weight * velocity[b].double()
            # CPS as released leaves out the variance: a normal with variance 1/2, up to a constant.
            std = 0.5**0.5 if isinstance(sampler, Cps) else move.std
            logp.append(torch.distributions.Normal(mean, std).log_prob(one.x_next[b].double()).mean())
        expected.append(torch.exp(logp[0] - logp[1]))
    assert loss.ratio is not None
    torch.testing.assert_close(loss.ratio, torch.stack(expected).float(), rtol=1e-4, atol=1e-6)


def test_beyond_the_clip_a_sample_pulls_no_further() -> None:
    log_ratio = torch.tensor([0.2, 0.2, -0.2, -0.2, 0.05], dtype=torch.float64, requires_grad=True)
    gains = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    loss, ratio, outside = clipped_surrogate(log_ratio, gains, 0.1)
    slope = torch.autograd.grad(loss.sum(), log_ratio)[0]
    # The first and the fourth went the way that their advantage asked for, and far enough.
    assert slope.tolist() == [0.0, ratio[1].item(), -ratio[2].item(), 0.0, -ratio[4].item()]
    assert loss.tolist() == pytest.approx([-1.1, ratio[1].item(), -ratio[2].item(), 0.9, -ratio[4].item()])
    assert outside.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: s.kind)
def test_the_kl_is_zero_at_the_reference_and_pulls_back_from_elsewhere(sampler: Stochastic) -> None:
    objective, one = flow(sampler, kl=0.5), a_pass(sampler)
    v, nothing = noise(3, 4, 2, seed=3).requires_grad_(), torch.zeros(3, dtype=torch.float64)
    at = objective.loss(one, Velocities(theta=v, old=v.detach(), base=v.detach()), nothing)
    assert at.kl.tolist() == [0.0, 0.0, 0.0]
    assert at.total.tolist() == [0.0, 0.0, 0.0]
    base = noise(3, 4, 2, seed=5)
    away = objective.loss(one, Velocities(theta=v, old=v.detach(), base=base), nothing)
    move = sde.transition(sampler, GRID.tolist(), 3)
    # KL of normals of one std, by Flow-GRPO without the step length in the variance.
    scale = move.std**2 if isinstance(sampler, Cps) else move.std**2 / 0.125
    distance = (move.v_weight * (v - base)).square().mean(dim=(1, 2)) / (2 * scale)
    torch.testing.assert_close(away.kl, distance)
    pull = torch.autograd.grad(away.total.sum(), v)[0]
    torch.testing.assert_close(pull, 0.5 * torch.autograd.grad(distance.sum(), v)[0])
    assert bool((pull != 0).all())


def test_flow_grpo_trains_all_but_the_last_transition_in_order() -> None:
    passes = flow(FlowSde()).passes(batch(7), CPU, 0)
    assert len(passes) == 7
    for k, one in enumerate(passes):
        assert one.x_t[:, 0, 0].tolist() == [k, 100 + k, 200 + k]
        assert one.x_next[:, 0, 0].tolist() == [k + 1, 101 + k, 201 + k]
        assert one.t.tolist() == pytest.approx([1 - k / 8] * 3)


def test_a_range_of_steps_leaves_the_other_transitions_out() -> None:
    passes = flow(FlowSde(), step_range=(2, 5)).passes(batch(7), CPU, 0)
    assert [one.t.tolist() for one in passes] == [[1 - k / 8] * 3 for k in (2, 3, 4)]
    assert [one.x_next[1, 0, 0].item() for one in passes] == [103, 104, 105]
    drawn = [dance(timestep_fraction=0.5, step_range=(2, 6)).passes(batch(7), CPU, n) for n in range(20)]
    assert {len(passes) for passes in drawn} == {2}  # of 4
    assert {int(one.x_t[0, 0, 0]) for passes in drawn for one in passes} == {2, 3, 4, 5}


def test_each_time_with_its_samples_dance_draws_other_transitions_and_flow_grpo_takes_the_same() -> None:
    taken = [tuple(int(one.x_t[0, 0, 0]) for one in dance().passes(batch(7), CPU, 0, epoch)) for epoch in range(9)]
    where = Address(run_seed=5, purpose="timesteps/3", prompt_id="p", index=batch(7).indices[0])
    assert taken[3] == tuple(permutation(where, 7)[:4])
    assert len(set(taken)) > 5
    first, second = (flow(FlowSde()).passes(batch(7), CPU, 0, epoch) for epoch in (0, 1))
    assert all(torch.equal(a.x_t, b.x_t) for a, b in zip(first, second, strict=True))


def test_with_windows_each_sample_stands_in_its_own() -> None:
    sampler = FlowSde(window=Window(size=2, range=(0, 5)))
    passes = flow(sampler).passes(batch(2, (1, 1, 3)), CPU, 0)
    assert [one.t.tolist() for one in passes] == [[1 - 1 / 8, 1 - 1 / 8, 1 - 3 / 8], [1 - 2 / 8, 1 - 2 / 8, 1 - 4 / 8]]
    for k, one in enumerate(passes):
        wanted = [sde.transition(sampler, GRID.tolist(), first + k) for first in (1, 1, 3)]
        assert one.coefficients.v_weight.tolist() == pytest.approx([move.v_weight for move in wanted])


def dance(**keys: Any) -> DanceGrpo:
    return DanceGrpo(sections.DanceGrpoConfig(**keys), sampler=DanceSde(), grid=GRID, run_seed=5)


def test_dance_trains_each_sample_on_a_share_of_its_own_transitions() -> None:
    passes = dance(timestep_fraction=0.6).passes(batch(7), CPU, 0)
    assert len(passes) == 4  # of 7
    trained = [{int(one.x_t[b, 0, 0]) - 100 * b for one in passes} for b in range(3)]
    assert all(len(steps) == 4 and steps <= set(range(7)) for steps in trained)
    for one in passes:
        assert torch.equal(one.x_next, one.x_t + 1)
    again = dance(timestep_fraction=0.6).passes(batch(7), CPU, 0)
    assert all(torch.equal(a.x_t, b.x_t) for a, b in zip(passes, again, strict=True))
    where = Address(run_seed=5, purpose="timesteps", prompt_id="p")
    orders = {tuple(dance().chosen(replace(where, iteration=iteration))) for iteration in range(20)}
    assert len(orders) > 10


def test_dance_is_flow_grpo_on_the_same_transitions() -> None:
    one, v, old = a_pass(DanceSde()), noise(3, 4, 2, seed=3), noise(3, 4, 2, seed=4)
    gains = torch.tensor([1.0, -2.0, 9.0], dtype=torch.float64)
    found, expected = (o.loss(one, Velocities(theta=v, old=old), gains) for o in (dance(), flow(DanceSde())))
    assert torch.equal(found.total, expected.total)


def test_samples_without_trajectories_are_refused() -> None:
    without = MicroBatch(prompt_ids=("p",), indices=(0,), x0=torch.zeros(1, 4, 2), weights=torch.ones(1))
    with pytest.raises(ValueError, match="needs the trajectories"):
        dance().passes(without, CPU, 0)
