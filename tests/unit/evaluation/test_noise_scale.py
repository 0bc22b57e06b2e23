"""What the noise scale says about the shape of an iteration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from solrl_ray.evaluation.noise_scale import advice, noise_scale
from tests.support.made_runs import config, iteration


@pytest.mark.parametrize(
    ("pairs", "scale", "said"),
    [
        ([(None, None)], None, ""),
        # (30 + 6) / (2 - 1): an iteration's own signal may be below zero. 12 / (12 + 36)
        (
            [(2.0, 30.0), (-1.0, 6.0)],
            36,
            "A step of 12 has 25% of the progress that it would have without noise. Neither",
        ),
        ([(1.0, 49.0), (None, None)], 49, "20% of the progress that it would have without noise. More prompts"),
        ([(2.0, 5.0)], 2.5, "83% of the progress that it would have without noise. Fewer prompts"),
        ([(-1.0, 5.0)], math.inf, "more prompts than can be told, with 8 seeds each"),
    ],
)
def test_advice_compares_the_noise_scale_with_the_prompts_of_a_step(
    pairs: list[tuple[float | None, float | None]], scale: float | None, said: str
) -> None:
    records = [replace(iteration(0), gradient_signal=signal, gradient_noise=noise) for signal, noise in pairs]
    assert noise_scale(records) == scale
    assert said in advice(config(), records)
