"""The DiffusionNFT objective: worked values, its gradient in closed form, and what it must not learn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solrl_ray.config.objectives import Advantage, DiffusionNftConfig
from solrl_ray.objectives.base import Loss, Velocities
from solrl_ray.objectives.forward_process import NoisedPass, noised
from solrl_ray.objectives.nft import DiffusionNft


def example(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Two samples of four numbers; the second one's advantage lies beyond the clip."""

    def tensor(*rows: list[float]) -> torch.Tensor:
        return torch.tensor(rows, dtype=dtype)

    x0 = tensor([0.5, -1, 0.25, 2], [1, 0, -0.5, 0.75])
    eps = tensor([1, 0.5, -0.5, -1], [-0.25, 1.5, 0.5, -0.75])
    t = torch.tensor([0.5, 0.8], dtype=dtype)
    v_old = tensor([0.4, 1.2, -0.6, -2.8], [-1, 1.2, 0.9, -1.4])
    delta = tensor([0.1, -0.2, 0.05, 0.3], [-0.1, 0.05, 0.2, -0.3])
    return {
        "v_theta": (v_old + delta).requires_grad_(),
        "v_old": v_old,
        "v_ref": v_old - 0.05,
        "x0": x0,
        "x_t": noised(x0, eps, t),
        "t": t,
        "advantages": torch.tensor([1.2, -7.0], dtype=torch.float64),
        "beta": 1.0,
        "kl": 1e-4,
        "adv_clip": 5.0,
    }


def nft_loss(
    *, v_theta: Any, v_old: Any, v_ref: Any, x0: Any, x_t: Any, t: Any, advantages: Any, **keys: float
) -> Loss:
    clip = keys.pop("adv_clip")
    objective = DiffusionNft(
        DiffusionNftConfig(advantage=Advantage(clip=clip), **keys), grid=torch.linspace(1, 0, 11), run_seed=0
    )
    one = NoisedPass(x_t=x_t, t=t, x0=x0, eps=torch.zeros_like(x0))
    return objective.loss(one, Velocities(theta=v_theta, old=v_old, base=v_ref), advantages)


def gradient(loss: Loss, v_theta: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.total.mean(), v_theta)[0]


WORKED = {
    1.0: {
        "total": 1.1223967946,
        "policy": 1.1223928571,
        "positive": [0.225, 0.1542857143],
        "negative": [0.07, 0.2828571429],
        "gradient": [
            [0.38000375, -0.4558370833, 0.0683358333, 0.8358420833],
            [-1.00000125, 1.0000025, 0.8571491071, -1.1428633929],
        ],
    },
    0.1: {
        "total": 7.4830448315,
        "policy": 7.4830408940,
        "positive": [0.1178773585, 0.1821021898],
        "negative": [0.0995921986, 0.1883926380],
        "gradient": [
            [-0.0272409978, -0.2465981565, 0.1068136869, 0.2193584088],
            [-1.2760748696, 1.4969350153, 0.5889633052, -0.6380430598],
        ],
    },
}


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5.1e-11), (torch.float32, 4e-6)])
def test_loss_and_gradient_have_their_worked_values(beta: float, dtype: torch.dtype, tolerance: float) -> None:
    inputs = example(dtype) | {"beta": beta}
    loss = nft_loss(**inputs)
    expected = WORKED[beta]
    assert {field.dtype for field in (loss.total, loss.policy, loss.kl)} == {dtype}
    assert loss.total.shape == (2,)
    assert loss.total.mean().item() == pytest.approx(expected["total"], abs=tolerance)
    assert loss.policy.mean().item() == pytest.approx(expected["policy"], abs=tolerance)
    assert loss.kl.mean().item() == pytest.approx(0.039375, abs=tolerance)
    good = [0.62, 0.0]  # the probability with which each sample counts as good
    errors = zip(good, expected["positive"], expected["negative"], strict=True)
    policy = [5.0 / beta * (r * positive + (1 - r) * negative) for r, positive, negative in errors]
    assert loss.policy.tolist() == pytest.approx(policy, abs=5.0 / beta * tolerance)
    expected_gradient = torch.tensor(expected["gradient"], dtype=dtype)
    found = gradient(loss, inputs["v_theta"])
    torch.testing.assert_close(found, expected_gradient, rtol=0, atol=tolerance)


def test_at_the_old_policy_good_and_bad_samples_weigh_alike() -> None:
    inputs = example()
    inputs |= {"v_theta": inputs["v_old"], "v_ref": inputs["v_old"]}
    loss = nft_loss(**inputs)
    assert loss.policy.mean().item() == pytest.approx(0.7308333333, abs=5.1e-11)
    others = nft_loss(**inputs | {"advantages": torch.tensor([-5.0, 3.0], dtype=torch.float64)})
    torch.testing.assert_close(others.policy, loss.policy, rtol=1e-12, atol=0)
    assert loss.kl.tolist() == [0, 0]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    beta=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
    advantage=st.floats(-9, 9),
    t=st.floats(0.02, 1),
)
def test_at_the_old_policy_the_gradient_is_its_closed_form(seed: int, beta: float, advantage: float, t: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x0, eps, v = torch.randn(3, 2, 4, 3, dtype=torch.float64, generator=generator)
    times = torch.tensor([t, 0.5], dtype=torch.float64)
    x_t = noised(x0, eps, times)
    inputs = {"x0": x0, "x_t": x_t, "t": times, "v_old": v, "v_ref": None, "beta": beta, "kl": 0.0}
    v_theta = v.clone().requires_grad_()
    advantages = torch.tensor([advantage, 0.0], dtype=torch.float64)
    loss = nft_loss(**inputs, v_theta=v_theta, advantages=advantages, adv_clip=5.0)
    found = gradient(loss, v_theta)
    # -A 2t (x0_hat - x0) / (w n B), whatever beta.
    error = x_t[0] - t * v[0] - x0[0]
    clipped = min(max(advantage, -5.0), 5.0)
    expected = -clipped * 2 * t * error / (error.abs().mean() * error.numel() * 2)
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12)
    # Advantage 0 says nothing at the old policy.
    torch.testing.assert_close(found[1], torch.zeros_like(found[1]), rtol=0, atol=1e-12)


def bounded(distance: float, advantage: float, **keys: Any) -> tuple[Loss, torch.Tensor, torch.Tensor]:
    """One sample of a policy that has moved by `distance` times |v_old - target| from v_old: its loss, its gradient and
    the way it went. Towards its target the loss of a good sample falls; away from it that of a bad one.
    """
    generator = torch.Generator().manual_seed(3)
    x0, eps, v_old, aside = torch.randn(4, 1, 6, dtype=torch.float64, generator=generator)
    target = eps - x0
    towards = (target - v_old) / (target - v_old).norm()
    aside = aside - (aside * towards).sum() * towards
    way = towards + 0.3 * aside / aside.norm()
    v_theta = (v_old + distance * (target - v_old).norm() * way / way.norm()).requires_grad_()
    times = torch.tensor([0.5], dtype=torch.float64)
    objective = DiffusionNft(DiffusionNftConfig(kl=0.0, **keys), grid=torch.linspace(1, 0, 11), run_seed=0)
    one = NoisedPass(x_t=noised(x0, eps, times), t=times, x0=x0, eps=eps)
    loss = objective.loss(one, Velocities(theta=v_theta, old=v_old), torch.tensor([advantage], dtype=torch.float64))
    return loss, gradient(loss, v_theta), way


@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_inside_its_bound_a_sample_teaches_as_without_one(advantage: float) -> None:
    for distance in (0.0, 0.09):
        found, free = bounded(distance, advantage, clip_range=0.1), bounded(distance, advantage)
        assert torch.equal(found[0].total, free[0].total)
        assert torch.equal(found[1], free[1])
        assert found[0].clipped is not None
        assert found[0].clipped.tolist() == [0]
        assert free[0].clipped is None


def test_beyond_its_bound_a_sample_moves_the_policy_no_further_and_still_back() -> None:
    loss, pull, way = bounded(0.2, 3.0, clip_range=0.1)
    at_the_bound, free_pull, _ = bounded(0.1, 3.0)
    torch.testing.assert_close(loss.total, at_the_bound.total)
    assert (pull * way).sum().abs() < 1e-12 < -(bounded(0.2, 3.0)[1] * way).sum()  # which would go on
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [1]
    # Across, it may turn: as at the bound, by a gradient that is as much shorter as the point is nearer.
    across = free_pull - (free_pull * way).sum() * way / way.square().sum()
    torch.testing.assert_close(pull, across / 2)
    # A bad sample that was moved towards its target is worse there than at the bound, and comes back.
    for free in ({}, {"clip_range": 0.1}):
        assert (bounded(0.2, -3.0, **free)[1] * way).sum() > 1e-3
    assert torch.equal(bounded(0.2, -3.0, clip_range=0.1)[1], bounded(0.2, -3.0)[1])


def test_no_gradient_reaches_the_sampling_or_the_reference_policy() -> None:
    inputs = example()
    inputs["v_old"] = inputs["v_old"].requires_grad_()
    inputs["v_ref"] = inputs["v_ref"].detach().requires_grad_()
    nft_loss(**inputs).total.mean().backward()
    assert inputs["v_theta"].grad is not None
    assert inputs["v_old"].grad is None
    assert inputs["v_ref"].grad is None


def test_each_samples_loss_is_its_own() -> None:
    inputs = example()
    together = nft_loss(**inputs)
    batched = ("v_theta", "v_old", "v_ref", "x0", "x_t", "t", "advantages")
    for row in range(2):
        alone = nft_loss(**inputs | {name: inputs[name][row : row + 1] for name in batched})
        torch.testing.assert_close(alone.total[0], together.total[row], rtol=1e-14, atol=0)


def test_without_kl_no_reference_is_needed() -> None:
    loss = nft_loss(**example() | {"kl": 0.0, "v_ref": None})
    assert torch.equal(loss.total, loss.policy)
    assert loss.kl.tolist() == [0, 0]


def test_a_perfect_prediction_does_not_divide_by_zero() -> None:
    inputs = example()
    inputs["v_theta"] = ((inputs["x_t"] - inputs["x0"]) / inputs["t"][:, None]).requires_grad_()
    inputs["v_old"] = inputs["v_theta"].detach()
    loss = nft_loss(**inputs)
    assert loss.policy.abs().max() < 1e-9
    assert torch.isfinite(gradient(loss, inputs["v_theta"])).all()


@pytest.mark.parametrize("name", ["old", "base", "anchor"])
def test_a_velocity_that_would_be_broadcast_is_refused_by_name(name: str) -> None:
    given = {"old": torch.zeros(2, 4)} | {name: torch.zeros(1, 4)}
    with pytest.raises(ValueError, match=rf"velocity {name} is torch.float32 \[1, 4\], theta's is .* \[2, 4\]"):
        Velocities(theta=torch.zeros(2, 4), **given)
    with pytest.raises(ValueError, match=r"theta must be float32 or float64, got torch\.bfloat16"):
        Velocities(theta=torch.zeros(2, 4, dtype=torch.bfloat16), **given)
