"""What is quantised must be finite, and its frozen scale has room."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.quantization.formats import frozen_amax, pack


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_somewhere_is_refused(wrong: float) -> None:
    weight = torch.ones(192, 32)
    weight[-1, 7] = wrong
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        pack("fp8-row", weight)
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        frozen_amax(weight)


def test_the_frozen_scale_has_room_above_the_largest_rounded_magnitude() -> None:
    assert frozen_amax(torch.tensor([[0.5, -2.001]])) == 1.5 * 2.0
