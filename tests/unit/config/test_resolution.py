"""How the shape of samples is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.config.loading import load, to_yaml
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape
from solrl_ray.storage import continuation

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("given", "shape"),
    [("512", SampleShape(512, 512)), ("[512, 768]", SampleShape(512, 768)), ("[64, 64]", SampleShape(64, 64))],
)
def test_a_number_is_a_square_and_a_pair_is_height_and_width(given: str, shape: SampleShape) -> None:
    assert load([DEMO], [f"model.resolution={given}"]).model.shapes == (shape,)


@pytest.mark.parametrize(
    ("given", "same"), [("512", "[512, 512]"), ("512", "[[512, 512]]"), ("[512, 768]", "[[512, 768]]")]
)
def test_however_a_shape_is_written_the_configuration_is_the_same(given: str, same: str) -> None:
    one, other = (load([DEMO], [f"model.resolution={each}"]) for each in (given, same))
    assert continuation.first_difference(one, other, free=()) is None
    assert to_yaml(one) == to_yaml(other)


def test_the_order_of_several_shapes_is_a_difference() -> None:
    """An address draws a shape by its place."""
    orders = ("[[64, 32], [32, 32]]", "[[32, 32], [64, 32]]")
    one, other = (load([DEMO], [f"model.resolution={each}"]) for each in orders)
    assert continuation.first_difference(one, other, free=()) == "model.resolution"


def test_a_list_of_pairs_is_several_shapes_and_survives_a_run_folder(tmp_path: Path) -> None:
    model = load([DEMO], ["model.resolution=[[64, 32], [32, 32]]"]).model
    tall, square = SampleShape(64, 32), SampleShape(32, 32)
    assert (model.shapes.largest, model.shapes.smallest, model.shapes.volume) == (tall, square, 1536)
    assert model.shapes == (tall, square)
    (tmp_path / "config.yaml").write_text(to_yaml(load([DEMO], ["model.resolution=[[64, 32], [32, 32]]"])))
    assert load([tmp_path / "config.yaml"]).model == model


@pytest.mark.parametrize(
    "given",
    [
        *("0", "-8", "true", "null", "wide", "512x512", "512.5", "512.0", "[]", "[512]", "[512, 0]", "[512.5, 512]"),
        *("[512, 512, 3]", "[[512, 512], 512]", "[[512]]", "[[]]", "[[512, 512], [512, 0]]", "{height: 512}"),
    ],
)
def test_what_is_no_shape_is_refused_in_one_sentence(given: str) -> None:
    with pytest.raises(UserError) as refused:
        load([DEMO], [f"model.resolution={given}"])
    said = str(refused.value)
    assert said.startswith("model.resolution in --set is ")
    assert all(right in said for right in ("whole number", "[height, width]", "list"))
    assert ". " not in said


def test_more_shapes_than_can_be_compiled_are_refused() -> None:
    pairs = [[64, 64 + 8 * number] for number in range(9)]
    assert len(load([DEMO], [f"model.resolution={pairs[:8]}"]).model.shapes) == 8
    with pytest.raises(UserError, match=r"^model\.resolution in --set is .* at most 8 shapes, .* not 9"):
        load([DEMO], [f"model.resolution={pairs}"])


def test_the_same_shape_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model\.resolution in --set is .*: \[512, 768\] is listed twice"):
        load([DEMO], ["model.resolution=[[512, 768], [64, 64], [512, 768]]"])
