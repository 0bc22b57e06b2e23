"""Signal and noise of groups' gradients, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from gradient_noise import seconds_a_group, signal_and_noise
from shape_results import Shape


def test_signal_is_the_mean_product_of_pairs_and_noise_the_variance() -> None:
    gradients = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]])
    found = signal_and_noise(gradients @ gradients.T)
    assert found["signal"] == pytest.approx((1 * 3 + 1 * 2 + 3 * 2) / 3)
    assert found["noise"] == pytest.approx(1.0)
    # The ratio without the first, second, and third: of one product and half of a squared difference.
    without = np.array([6 / 0.5, 2 / 0.5, 3 / 2])
    assert found["stderr"] == pytest.approx(np.sqrt(2 / 3 * np.square(without - without.mean()).sum()))


def test_a_group_is_charged_without_the_fixed_cost_of_an_iteration() -> None:
    one, many = (Shape(prompts, 8, 48, 1) for prompts in (1, 12))
    fixed = many.charged("flux1_dev") - 12 * seconds_a_group(one)
    assert 0 <= fixed < seconds_a_group(one)
