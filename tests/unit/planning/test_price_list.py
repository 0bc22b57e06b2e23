"""Price lists of cards that nobody measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from solrl_ray.errors import UserError
from solrl_ray.planning.prices import price_list, shipped_lists


def test_steps_are_scaled_by_tflops_and_passes_and_decoding_by_bandwidth_as_well() -> None:
    measured, other = price_list("h200"), price_list("l40s")
    assert [model.family for model in other.models] == [model.family for model in measured.models]
    for here, there in zip(other.models, measured.models, strict=True):
        compute, memory = 989 / 362, 4.8 / 0.864
        assert here.steps["fp8"].ms == pytest.approx(compute * there.steps["fp8"].ms)
        for tier, steps in there.scopes.items():
            assert [step.ms for step in here.scopes[tier]] == pytest.approx([compute * step.ms for step in steps])
            assert [step.weights for step in here.scopes[tier]] == [step.weights for step in steps]
        both = (2 * compute + memory) / 3
        assert here.backward.ms == pytest.approx(both * there.backward.ms)
        assert here.compiled is not None
        assert there.compiled is not None
        assert here.compiled.half.ms == pytest.approx(both * there.compiled.half.ms)
        assert here.decode_and_reward.ms == pytest.approx(both * there.decode_and_reward.ms)
        assert here.load.ms == there.load.ms
        assert here.checkpoint.ms == there.checkpoint.ms


def test_a_scaled_figure_is_an_estimate_that_names_its_rule() -> None:
    step = price_list("a100-80").models[0].steps["bf16"]
    assert not step.measured
    assert step.source == "28.6 ms on NVIDIA H200, times 3.2, the ratio of BF16 TFLOP/s"


def test_a_card_has_the_tiers_of_its_kernels_alone() -> None:
    assert {name: set(price_list(name).models[0].steps) for name in ("a100-80", "rtx4090", "rtx5090")} == {
        "a100-80": {"bf16"},
        "rtx4090": {"bf16", "fp8"},
        "rtx5090": {"bf16", "fp8", "nvfp4"},
    }


def test_a_list_keeps_its_own_figures_beside_scaled_ones() -> None:
    own, *scaled = price_list("b200").models
    assert (own.family, own.steps["nvfp4"].ms) == ("sd3", 25)
    listed = [model.family for model in price_list("h200").models]
    assert [model.family for model in scaled] == [family for family in listed if family != "sd3"]


@pytest.mark.parametrize("name", shipped_lists())
def test_every_shipped_card_states_its_memory_and_fastest_tier(name: str) -> None:
    prices = price_list(name)
    assert prices.device is not None
    assert 24e9 < prices.device.memory < 200e9
    assert prices.speed is not None
    assert prices.fastest in prices.speed.tiers


@pytest.mark.parametrize(
    ("typed", "gpu"),
    [
        ("RTX 4090", "NVIDIA RTX 4090"),
        ("NVIDIA H100 80GB", "NVIDIA H100 80GB"),
        ("A6000", "NVIDIA RTX A6000"),
        ("rtx_pro_6000", "NVIDIA RTX PRO 6000"),
    ],
)
def test_a_gpu_is_known_however_its_name_is_written(typed: str, gpu: str) -> None:
    assert price_list(typed).gpu == gpu


def test_a_size_stands_for_any_gpu_of_that_memory_and_has_no_prices() -> None:
    found = price_list("48 gb")
    assert found.device is not None
    assert (found.device.memory, found.models) == (48e9, ())


@pytest.mark.parametrize("wrong", ["h900", "a6000x2", "48TB"])
def test_an_unknown_gpu_is_refused_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(UserError, match=f"gpu is '{wrong}' .* a size such as 48GB"):
        price_list(wrong)


def test_a_list_like_no_other_or_without_a_speed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    for text in ("like: h300", "like: h200"):
        file.write_text(f"gpu: mine\nfastest: fp8\n{text}\n")
        with pytest.raises(
            UserError, match=r"card\.yaml: like is 'h\d00'; it must be one of a10, .* and the key speed"
        ):
            price_list(str(file))
