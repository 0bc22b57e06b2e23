"""NaN and infinity are found, whatever else a tensor holds."""

import pytest
import torch

from solrl_ray.common.finite import first_not_finite


def is_finite(tensor: torch.Tensor) -> bool:
    return not first_not_finite({"it": tensor})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_element_is_enough(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.linspace(-3e38, 3e38, 1000, dtype=torch.float64).to(dtype)
    assert is_finite(tensor)
    tensor[place] = bad
    assert not is_finite(tensor)
    assert not is_finite(tensor.reshape(8, 125).t())


def test_the_first_by_name_is_named() -> None:
    bad = torch.tensor([1.0, float("nan")])
    assert first_not_finite({"c": bad, "b": bad, "a": torch.ones(3), "nothing": torch.empty(0)}) == "b"
    assert first_not_finite({"a": torch.ones(3), "scalar": torch.tensor(2.0)}) == ""
    assert first_not_finite({}) == ""
    assert is_finite(torch.empty(0, 4))
    assert is_finite(torch.tensor([1e300], dtype=torch.float64))  # which no float32 can hold
