"""Advantage-weighted matching: worked values, its gradient, and its kinship with DiffusionNFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from solrl_ray.config import objectives as sections
from solrl_ray.objectives.awm import Awm, log_likelihood
from solrl_ray.objectives.base import Loss, Velocities
from solrl_ray.objectives.forward_process import NoisedPass, noised, stratified_steps
from solrl_ray.records import Address

GRID = torch.linspace(1, 0, 15)


def a_pass(seed: int = 0) -> NoisedPass:
    generator = torch.Generator().manual_seed(seed)
    x0, eps = (torch.randn(3, 4, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    t = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    return NoisedPass(x_t=noised(x0, eps, t), t=t, x0=x0, eps=eps)


def velocity(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def awm(**keys: Any) -> Awm:
    return Awm(sections.AwmConfig(**{"kl": 0.0, "anchor": sections.Anchor(weight=0.0), **keys}), grid=GRID, run_seed=1)


def gradient(loss: Loss, v: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.total.sum(), v, retain_graph=True)[0]


GAINS = torch.tensor([1.5, -0.5, 7.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("weighting", "power", "value"),
    [("ghuber", 0.25, -1.5103038107), ("huber", 0.25, -0.2399940001), ("uniform", 0.25, -0.16)],
)
def test_worked_likelihoods(weighting: Any, power: float, value: float) -> None:
    v, target = torch.full((1, 4), 0.4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)  # l = 0.16
    t = torch.tensor([0.6], dtype=torch.float64)
    assert log_likelihood(v, target, t, weighting, power).item() == pytest.approx(value, abs=1e-9)


def test_worked_slope() -> None:
    error = torch.tensor([0.16], dtype=torch.float64, requires_grad=True)
    v = error.sqrt()[:, None]
    logp = log_likelihood(
        v, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64), "ghuber", 0.25
    )
    logp.sum().backward()
    assert error.grad is not None
    assert error.grad.item() == pytest.approx(-2.3717082440, abs=1e-8)


@pytest.mark.parametrize("weighting", ["uniform", "huber", "ghuber"])
def test_on_policy_its_gradient_is_that_of_the_likelihood_times_the_scaled_advantage(weighting: Any) -> None:
    one, v = a_pass(), velocity(5).requires_grad_()
    objective = awm(weighting=weighting, advantage_max=2.0)
    loss = objective.loss(one, Velocities(theta=v, old=v.detach()), GAINS)
    assert loss.ratio is not None
    assert torch.equal(loss.ratio, torch.ones(3, dtype=torch.float64))
    scaled = torch.tensor([0.6, -0.2, 2.0], dtype=torch.float64)  # clipped at 5, then 5 becomes 2
    logp = log_likelihood(v, one.eps - one.x0, one.t, weighting, 0.25)
    expected = torch.autograd.grad((-scaled * logp).sum(), v)[0]
    torch.testing.assert_close(gradient(loss, v), expected, rtol=1e-12, atol=1e-15)


def test_reference_and_anchor_pull_back_each_with_its_weight() -> None:
    one, v, base, anchor = a_pass(), velocity(5).requires_grad_(), velocity(6), velocity(7)
    objective = awm(kl=0.5, anchor=sections.Anchor(weight=2.0))
    kept = [awm(), awm(kl=0.1), awm(anchor=sections.Anchor()), objective]  # forwards that weigh nothing are left out
    references = [one._config.references() for one in kept]
    assert references == [(), ("base",), ("anchor",), ("base", "anchor")]
    given = Velocities(theta=v, old=v.detach(), base=base, anchor=anchor)
    loss = objective.loss(one, given, torch.zeros(3, dtype=torch.float64))
    expected = 0.5 * (2 / 8) * (v - base) + 2.0 * (2 / 8) * (v - anchor)
    torch.testing.assert_close(gradient(loss, v), expected.detach(), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(loss.kl, (v - base).square().mean(dim=(1, 2)))


@pytest.mark.parametrize(
    ("first", "end", "slices"),
    [
        (0, 12, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]),
        (1, 12, [(1, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]),  # 14 steps and skip_first, as released
        (0, 9, [(step, step + 1) for step in range(9)]),
        (2, 5, [(2, 5)]),
        (0, 10, [(0, 2), (2, 5), (5, 7), (7, 10)]),
    ],
)
def test_one_step_comes_from_each_slice_and_none_twice(first: int, end: int, slices: list[tuple[int, int]]) -> None:
    seen = [set[int]() for _ in slices]
    for index in range(300):
        where = Address(run_seed=3, purpose="timesteps", iteration=1, prompt_id="p", index=index)
        for found, step in zip(seen, stratified_steps(where, first=first, end=end, count=len(slices)), strict=True):
            found.add(int(step))
    assert seen == [set(range(*each)) for each in slices]


def test_the_published_schedule_of_14_steps() -> None:
    objective = Awm(sections.AwmConfig(skip_first=True), grid=GRID, run_seed=1)
    steps = objective.steps(Address(run_seed=1, purpose="timesteps", prompt_id="p"))
    assert len(steps) == 6
    assert 1 <= steps.min() <= steps.max() < 12
    early = Awm(sections.AwmConfig(skip_first=True, timesteps=3, step_range=(2, 8)), grid=GRID, run_seed=1)
    drawn = {int(step) for n in range(99) for step in early.steps(Address(run_seed=n, purpose="timesteps"))}
    assert drawn == {3, 4, 5, 6}  # of 2 … 7 the leading nine tenths, without the first
