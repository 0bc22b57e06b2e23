"""Tiers by device: what is refused, what `auto` means. The cards are stated, not present."""

import pytest
import torch

from solrl_ray.errors import UserError
from solrl_ray.quantization import capability

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine with a card of the given capability, and with or without Transformer Engine."""
    major_minor, engine = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: major_minor)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    monkeypatch.setattr(capability.importlib.util, "find_spec", lambda name: object() if engine else None)


@pytest.mark.parametrize(
    ("card", "tiers", "auto"),
    [
        (((8, 0), True), ["nvfp4-emulated"], "bf16"),
        (((8, 9), False), ["fp8", "nvfp4-emulated"], "fp8"),
        (((9, 0), True), ["fp8", "nvfp4-emulated"], "fp8"),
        (((10, 0), False), ["fp8", "nvfp4-emulated"], "fp8"),
        (((10, 0), True), ["nvfp4", "fp8", "nvfp4-emulated"], "nvfp4"),
        (((12, 0), True), ["nvfp4", "fp8", "nvfp4-emulated"], "nvfp4"),
    ],
    indirect=["card"],
)
def test_auto_is_the_fastest_tier_that_a_card_has(card: None, tiers: list[str], auto: str) -> None:
    assert capability.available(CUDA) == tiers
    assert capability.resolve("auto", CUDA, "bfloat16") == auto


def test_auto_on_a_cpu_has_the_numerics_of_a_card() -> None:
    assert capability.resolve("auto", CPU, "bfloat16") == "nvfp4-emulated"
    assert capability.resolve("auto", CPU, "float32") == "nvfp4-emulated"
    assert capability.resolve("float32", CPU, "float32") == "float32"


@pytest.mark.parametrize("card", [((9, 0), True)], indirect=True)
def test_nvfp4_on_hopper_is_refused_with_the_tiers_that_it_has(card: None) -> None:
    with pytest.raises(
        UserError, match=r"nvfp4 does not run on Some Card \(sm_90\): .* 10\.0 .* fp8, nvfp4-emulated, or"
    ):
        capability.check("nvfp4", CUDA)
    for tier in ("fp8", "nvfp4-emulated", "bf16"):
        capability.check(tier, CUDA)
