"""ODE solvers against worked values and an exact solution."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.sampling.schedules import sigmas
from solrl_ray.sampling.solvers import Solver, SolverState, Velocity, advance, together

FLUX = SigmaSchedule(kind="flux")
SD3 = SigmaSchedule(kind="shift")
LINEAR = SigmaSchedule(kind="linear")


def field(latents: torch.Tensor, sigma: float) -> torch.Tensor:
    return -0.7 * latents + 0.3 * sigma


def integrate(velocity: Velocity, noise: torch.Tensor, grid: torch.Tensor, solver: Solver) -> torch.Tensor:
    return advance(velocity, SolverState(noise), grid, solver).latents


@pytest.mark.parametrize(
    ("schedule", "steps", "solver", "expected"),
    [
        (FLUX, 10, "dpm2", 1.7540156076),
        (FLUX, 6, "dpm2", 1.7144956965),
        (SD3, 10, "dpm2", 1.8730271296),
        (SD3, 6, "dpm2", 1.8737140718),
        (LINEAR, 10, "euler", 1.7162199739),
        (LINEAR, 6, "euler", 1.6827050990),
    ],
)
def test_integrals_of_a_linear_field_have_their_worked_values(
    schedule: SigmaSchedule, steps: int, solver: str, expected: float
) -> None:
    grid = sigmas(schedule, steps, image_tokens=1024)
    noise = torch.ones(1, 3, dtype=torch.float64)
    found = integrate(field, noise, grid, solver)
    assert found[0].tolist() == pytest.approx([expected] * 3, abs=5.1e-11)
    single = integrate(field, noise.float(), grid, solver)
    assert single.dtype == torch.float32
    assert single[0].tolist() == pytest.approx([expected] * 3, abs=1e-6)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_straight_flow_is_followed_exactly_in_any_number_of_steps(solver: str) -> None:
    x0, noise = torch.randn(2, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for steps in (1, 2, 3, 9):
        found = integrate(lambda z, s: noise - x0, noise, sigmas(LINEAR, steps, 0), solver)
        torch.testing.assert_close(found, x0, rtol=0, atol=1e-14)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_the_noise_is_left_as_it_was_and_rows_do_not_mix(solver: str) -> None:
    noise = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    before = noise.clone()
    together = integrate(field, noise, sigmas(FLUX, 6, 64), solver)
    assert torch.equal(noise, before)
    for row in range(3):
        alone = integrate(field, noise[row : row + 1], sigmas(FLUX, 6, 64), solver)
        assert torch.equal(together[row : row + 1], alone)


def test_bad_arguments_are_refused_by_name() -> None:
    noise = torch.ones(1, 2)
    grid = sigmas(LINEAR, 2, 0)
    with pytest.raises(ValueError, match="solver is 'heun'"):
        integrate(field, noise, grid, "heun")
    with pytest.raises(ValueError, match=r"not torch\.bfloat16"):
        integrate(field, noise.bfloat16(), grid, "euler")
    with pytest.raises(ValueError, match="end in 0"):
        integrate(field, noise, grid[:-1], "euler")
    with pytest.raises(ValueError, match="must fall strictly"):
        integrate(field, noise, torch.tensor([1.0, 1.0, 0.0]), "euler")
    with pytest.raises(ValueError, match=r"torch\.float64 \[1, 2\]"):
        integrate(lambda z, s: z.double(), noise, grid, "euler")


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_rows_that_go_on_after_a_stop_end_where_they_would_have(solver: str, stop: int) -> None:
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    grid = sigmas(FLUX, 6, 64)
    whole = integrate(field, noise, grid, solver)
    begun = [advance(field, SolverState(part), grid, solver, first=0, end=stop) for part in noise.split(3)]
    rest = together(begun).rows(torch.tensor([4, 0, 5]))
    assert torch.equal(advance(field, rest, grid, solver, first=stop, end=6).latents, whole[[4, 0, 5]])


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_the_estimate_of_a_step_is_where_a_straight_line_from_its_start_ends(solver: str) -> None:
    grid = sigmas(FLUX, 6, 64)
    before = advance(field, SolverState(torch.ones(2, 3)), grid, solver, first=0, end=2)
    after = advance(field, before, grid, solver, first=2, end=3)
    sigma = float(grid[2])
    assert after.x0 is not None
    assert torch.equal(after.x0, before.latents - sigma * field(before.latents, sigma))
    last = advance(field, after, grid, solver, first=3, end=6)
    torch.testing.assert_close(last.x0, last.latents)  # the last step's is what it ends in
