"""How the shape of samples is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config.loading import load
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("given", "shape"),
    [("512", SampleShape(512, 512)), ("[512, 768]", SampleShape(512, 768)), ("[64, 64]", SampleShape(64, 64))],
)
def test_a_number_is_a_square_and_a_pair_is_height_and_width(given: str, shape: SampleShape) -> None:
    assert load([DEMO], [f"model.resolution={given}"]).model.shape == shape


@pytest.mark.parametrize("given", ["0", "-8", "true", "wide", "512.5", "[]", "[512]", "[512, 0]", "[512, 512, 3]"])
def test_what_is_no_shape_is_refused_in_one_sentence(given: str) -> None:
    with pytest.raises(UserError) as refused:
        load([DEMO], [f"model.resolution={given}"])
    said = str(refused.value)
    assert said.startswith("model.resolution in --set is ")
    assert "[height, width]" in said
