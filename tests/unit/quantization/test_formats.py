"""A weight that is quantised some rows at a time has the bytes of one that is quantised whole."""

from __future__ import annotations

import pytest
import torch

from solrl_ray.quantization.formats import ROWS, TENSORS, frozen_amax, pack, pack_by_rows
from solrl_ray.quantization.planning import Format


@pytest.mark.parametrize("format", TENSORS)
@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 5])
def test_rows_are_quantised_alone_as_in_the_whole_weight(format: Format, rows: int) -> None:
    weight = torch.randn(rows, 80, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    weight[0] *= 8  # other rows have other scales than the first
    amax = frozen_amax(weight) if format == "nvfp4" else None
    whole, by_rows = pack(format, weight, amax), pack_by_rows(format, weight, amax)
    assert by_rows.keys() == whole.keys()
    assert all(torch.equal(by_rows[name], whole[name]) for name in whole)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_somewhere_is_refused(wrong: float) -> None:
    weight = torch.ones(3 * ROWS, 32)
    weight[-1, 7] = wrong
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        pack_by_rows("fp8-row", weight)
    with pytest.raises(ValueError, match="cannot quantise a weight"):
        frozen_amax(weight)


def test_the_frozen_scale_has_room_above_the_largest_rounded_magnitude() -> None:
    assert frozen_amax(torch.tensor([[0.5, -2.001]])) == 1.5 * 2.0
