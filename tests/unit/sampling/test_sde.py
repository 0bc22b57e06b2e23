"""Stochastic samplers: worked steps, limits, the marginals they keep, and previews on the same Brownian path."""

from __future__ import annotations

import math

import pytest
import torch

from solrl_ray.config.samplers import Cps, DanceSde, FlowSde, Stochastic, Window
from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.sampling import sde
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.sampling.sde import Coefficients, Transition
from solrl_ray.sampling.solvers import SolverState

X, V, X_NEXT = torch.tensor([[[0.5, -1.0]], [[0.2, 0.4]], [[0.45, -1.1]]], dtype=torch.float64)
FLUX = sigmas(SigmaSchedule(kind="flux"), 10, 1024).tolist()


def scored(move: Transition) -> tuple[list[float], float]:
    """Mean and log-probability of the worked example, in float64."""
    coefficients = Coefficients.of([move], torch.device("cpu"), torch.float64)
    mean = sde.mean(coefficients, X, V)
    return mean[0].tolist(), sde.log_probability(coefficients, X_NEXT, mean).item()


# Worked out with NumPy from the papers' formulas.
WORKED = [
    (FlowSde(noise_level=0.7), (1.0, 0.8, 0.6, 0.0), 1, 0.6260990337, [0.3277, -0.8546], -0.4986372537),
    (FlowSde(noise_level=0.7), (1.0, 0.9, 0.0), 0, 0.7, [0.3575, -0.795], -0.6140907576),
    (FlowSde(noise_level=0.7), (1.0, 0.3, 0.0), 1, 0.2509980080, [0.3728, -1.0444], 0.4274542828),
    (DanceSde(eta=0.3), (1.0, 0.8, 0.6, 0.0), 1, 0.1341640786, [0.453925, -1.06965], 1.0767458923),
    (Cps(noise_level=0.8), (1.0, 0.8, 0.6, 0.0), 1, 0.5706339098, [0.2361215062, -0.6985773809], -0.1034420646),
]


@pytest.mark.parametrize(("sampler", "grid", "step", "std", "mean", "log_probability"), WORKED)
def test_worked_steps(
    sampler: Stochastic, grid: tuple[float, ...], step: int, std: float, mean: list[float], log_probability: float
) -> None:
    move = sde.transition(sampler, grid, step)
    found, logp = scored(move)
    assert move.std == pytest.approx(std, abs=1e-10)
    assert found == pytest.approx(mean, abs=1e-9)
    assert logp == pytest.approx(log_probability, abs=1e-9)


def test_many_small_steps_keep_the_variance_of_the_forward_process() -> None:
    # x0 ~ N(0, d²): then x_sigma ~ N(0, m²) with m² = (1 - sigma)² d² + sigma², and the velocity is linear.
    d2, grid = 0.25, [1 - i / 4000 for i in range(4001)]

    def marginal(sigma: float) -> float:
        return (1 - sigma) ** 2 * d2 + sigma**2

    for sampler in (FlowSde(noise_level=0.7), DanceSde(eta=0.3), Cps(noise_level=0.05)):
        variance = 1.0
        for i, sigma in enumerate(grid[:3000]):
            slope = (sigma - (1 - sigma) * d2) / marginal(sigma)  # E[noise - x0 | x] / x
            move = sde.transition(sampler, grid, i)
            variance = (move.x_weight + move.v_weight * slope) ** 2 * variance + move.std**2
        assert variance == pytest.approx(marginal(0.25), rel=5e-3), sampler


def test_cps_brings_the_noise_of_its_next_level_whatever_the_noise_level() -> None:
    for a in (0.2, 0.8, 1.0):
        move = sde.transition(Cps(noise_level=a), (1.0, 0.7, 0.0), 0)
        # With x = noise and v = noise - x0: weights of x0 and of all noise.
        assert -move.v_weight == pytest.approx(0.3, abs=1e-12)
        assert math.hypot(move.x_weight + move.v_weight, move.std) == pytest.approx(0.7, abs=1e-12)


def test_a_grid_is_thinned_evenly_with_both_ends() -> None:
    assert sde.nested(10, 6) == [0, 2, 3, 5, 7, 8, 10]


@pytest.mark.parametrize("steps", [1, 3, 6, 7, 10])
def test_a_preview_visits_noise_levels_of_the_full_schedule(steps: int) -> None:
    points = sde.nested(10, steps)
    assert (points[0], points[-1], len(points)) == (0, 10, steps + 1)
    assert sorted(set(points)) == points
    planned = sde.plan(FlowSde(), FLUX, steps)
    assert [step.sigma for step in planned] == [FLUX[i] for i in points[:-1]]


def test_a_longer_steps_increment_is_the_sum_of_those_inside_it_and_of_unit_variance() -> None:
    for step in sde.plan(FlowSde(), FLUX, 6):
        weights = [weight for _, weight in step.increments]
        assert math.fsum(w * w for w in weights) == pytest.approx(1.0, abs=1e-12)
    first = sde.plan(FlowSde(), FLUX, 6)[0]
    fine = [FLUX[0] - FLUX[1], FLUX[1] - FLUX[2]]
    assert [i for i, _ in first.increments] == [0, 1]
    assert [w for _, w in first.increments] == pytest.approx([math.sqrt(dt / sum(fine)) for dt in fine])


def test_a_full_trajectory_takes_each_increment_once_and_unweighted() -> None:
    for sampler, last in ((FlowSde(), 10), (DanceSde(), 9), (Cps(), 9)):
        steps = sde.plan(sampler, FLUX, 10)
        assert [step.increments for step in steps[:last]] == [((i, 1.0),) for i in range(last)]
        assert all(step.increments == () and step.transition.std == 0 for step in steps[last:])


def test_dances_last_step_is_its_estimate_of_the_image() -> None:
    for steps in (4, 10):
        last = sde.plan(DanceSde(), FLUX, steps)[-1]
        mean, _ = scored(last.transition)
        assert mean == pytest.approx((X - last.sigma * V)[0].tolist(), abs=1e-7)


@pytest.mark.parametrize("sampler", [FlowSde(noise_level=0.7), DanceSde(eta=0.3)], ids=lambda s: s.kind)
def test_a_preview_comes_to_the_end_of_the_full_path_as_steps_become_small(sampler: Stochastic) -> None:
    generator = torch.Generator().manual_seed(0)
    full = 512
    grid = sigmas(SigmaSchedule(kind="linear"), full, 1).tolist()
    noise, *normals = torch.randn(full + 1, 64, 8, dtype=torch.float64, generator=generator)
    increments = dict(enumerate(normals))

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        towards = (sigma - 0.25 * (1 - sigma)) / (0.25 * (1 - sigma) ** 2 + sigma**2)
        return towards * x + 0.3 * (1 - sigma) * torch.sin(3 * x)

    def end(steps: int) -> torch.Tensor:
        return sde.integrate(velocity, SolverState(noise), sde.plan(sampler, grid, steps), increments)[0].latents

    exact = end(full)
    errors = [float((end(steps) - exact).abs().mean()) for steps in (8, 32, 128)]
    of_another_path = float((exact - exact.roll(1, dims=0)).abs().mean())
    assert errors[0] < 0.3 * of_another_path
    assert errors[1] < errors[0] / 1.6
    assert errors[2] < errors[1] / 1.6  # Euler-Maruyama's strong order is 1/2: a factor of 2 in the limit


def test_with_a_window_the_other_steps_are_eulers() -> None:
    sampler = FlowSde(window=Window(size=3, range=(0, 8)))
    steps = sde.plan(sampler, FLUX, 10, start=2)
    assert [bool(step.increments) for step in steps] == [False, False, True, True, True, *[False] * 5]
    assert steps[0].transition == sde.euler(FLUX[0], FLUX[1])
    assert steps[3].transition == sde.transition(sampler, FLUX, 3)


def test_a_step_half_inside_of_a_window_carries_the_noise_of_that_half() -> None:
    sampler = DanceSde(eta=0.3, window=Window(size=1, range=(0, 8)))
    step = sde.plan(sampler, FLUX, 6, start=1)[0]  # the full schedule's steps 0 and 1
    length = FLUX[1] - FLUX[2]
    assert step.increments == ((1, 1.0),)
    assert step.transition.std == pytest.approx(0.3 * math.sqrt(length))
    assert step.transition == sde.sde(1.0, FLUX[2], 0.3, length)


def test_integration_is_the_recurrence() -> None:
    steps = sde.plan(FlowSde(noise_level=0.5), FLUX, 10)
    generator = torch.Generator().manual_seed(1)
    increments = {i: torch.randn(2, 3, generator=generator) for i in range(10)}
    noise = torch.randn(2, 3, generator=generator)
    end, states = sde.integrate(
        lambda x, sigma: 0.4 * x, SolverState(noise), steps, increments, keep=range(len(steps) + 1)
    )
    assert len(states) == 11
    assert states[0] is noise
    assert states[-1] is end.latents
    for i, step in enumerate(steps):
        move = step.transition
        mean = move.x_weight * states[i] + move.v_weight * 0.4 * states[i]
        torch.testing.assert_close(states[i + 1], mean + move.std * increments[i], rtol=1e-5, atol=1e-6)
    again, kept = sde.integrate(lambda x, sigma: 0.4 * x, SolverState(noise), steps, increments, keep=range(3, 6))
    assert torch.equal(again.latents, end.latents)
    assert all(torch.equal(state, states[3 + i]) for i, state in enumerate(kept))
    assert len(kept) == 3
    assert sde.integrate(lambda x, sigma: 0.4 * x, SolverState(noise), steps, increments)[1] == []


def test_a_trajectory_that_is_stopped_goes_on_as_if_it_had_not_been() -> None:
    steps = sde.plan(DanceSde(), FLUX, 6)
    generator = torch.Generator().manual_seed(2)
    increments = {i: torch.randn(2, 3, generator=generator) for i in range(10)}
    noise = torch.randn(2, 3, generator=generator)
    end, _ = sde.integrate(lambda x, sigma: 0.4 * x, SolverState(noise), steps, increments)
    begun, (before,) = sde.integrate(lambda x, sigma: 0.4 * x, SolverState(noise), steps[:3], increments, keep=[2])
    assert begun.x0 is not None
    assert torch.equal(begun.x0, before - steps[2].sigma * (0.4 * before))
    assert torch.equal(sde.integrate(lambda x, sigma: 0.4 * x, begun, steps[3:], increments)[0].latents, end.latents)
