"""What a family's memory is estimated from, counted again."""

from __future__ import annotations

import activation_sizes
import model_shapes
import pytest
from torch.nn import functional

from solrl_ray.models import FAMILIES

MODELS = [name for name in model_shapes.PUBLISHED if name in ("sd35_medium", "sana_1600m")]
"""The quick ones; `python benchmarks/activation_sizes.py` counts all."""


@pytest.mark.parametrize("name", MODELS)
def test_forwards_and_decodings_hold_what_the_plan_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", activation_sizes.one_kernel)
    sizes = FAMILIES[model_shapes.configuration(name).family].SIZES
    assert activation_sizes.forward_values(name) == pytest.approx(sizes.forward_values, abs=0.1)
    parameters, bytes_a_pixel = activation_sizes.decoding(name)
    assert parameters == sizes.decoder.parameters
    assert bytes_a_pixel == pytest.approx(sizes.decoder.bytes_a_pixel, abs=1)
