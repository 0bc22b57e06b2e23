"""An explorer states what it really runs, and refuses to start on numbers that are wrong."""

import pytest
import torch
from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.errors import RunError
from solrl_ray.quantization import attestation, nvfp4
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_

CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)


def test_a_quantised_model_is_attested_by_known_answers_and_an_exact_product() -> None:
    net = model()
    report = quantize_(net, "nvfp4-emulated", QuantizationScope(skip=["2"]))
    checks = attestation.attest(net, "nvfp4-emulated", report)
    assert checks["layers"] == "1 EmulatedNVFP4Linear, 1 Linear"
    assert checks["known-answer vectors"] == "17 of 17, variant te-1d"
    assert checks["product against exact arithmetic"].startswith("4608 outputs, largest error ")


def test_full_precision_is_attested_by_its_weights() -> None:
    for tier, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        net = model(dtype)
        checks = attestation.attest(net, tier, quantize_(net, tier, QuantizationScope()))
        assert checks == {"layers": "2 Linear", "arithmetic": str(dtype).removeprefix("torch.")}


def test_a_tier_that_the_weights_belie_is_refused() -> None:
    net = model(torch.bfloat16)
    with pytest.raises(RunError, match=r"2 linears are not torch\.float32; the first is 0"):
        attestation.attest(net, "float32", quantize_(net, "float32", QuantizationScope()))


def test_layers_that_fell_back_are_noticed() -> None:
    net = model()
    report = quantize_(net, "nvfp4-emulated", QuantizationScope())
    net[0] = nn.Linear(32, 64)
    with pytest.raises(RunError, match="1 layers of the model are quantised, but 2 were reported"):
        attestation.attest(net, "nvfp4-emulated", report)
    whole = model()
    with pytest.raises(RunError, match="reported for tier float32, and nvfp4-emulated was requested"):
        attestation.attest(whole, "nvfp4-emulated", quantize_(whole, "float32", QuantizationScope()))


def test_a_quantiser_with_another_tie_rule_fails_its_known_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_up(y: torch.Tensor) -> torch.Tensor:
        thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        return (torch.bucketize(y.abs(), thresholds, right=True) + 8 * torch.signbit(y)).to(torch.uint8)

    monkeypatch.setattr(nvfp4, "values_to_codes", half_up)
    with pytest.raises(RunError, match="known answer V02_ties_pt1 of NVFP4 is not met on cpu"):
        attestation.check_vectors(CPU)


def test_a_product_that_loses_precision_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = EmulatedNVFP4Linear.forward

    def through_bfloat16(self: EmulatedNVFP4Linear, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x).to(torch.bfloat16).float()

    monkeypatch.setattr(EmulatedNVFP4Linear, "forward", through_bfloat16)
    with pytest.raises(RunError, match="the nvfp4-emulated product on cpu is off by"):
        attestation.check_product(CPU)


def test_a_score_class_names_what_fixes_the_bits() -> None:
    same = attestation.score_class(CPU, "nvfp4-emulated", micro_batch=24, threads=1)
    assert same == attestation.score_class(CPU, "nvfp4-emulated", micro_batch=24, threads=1)
    assert len(same) == 16
    others = {
        attestation.score_class(CPU, "float32", micro_batch=24, threads=1),
        attestation.score_class(CPU, "nvfp4-emulated", micro_batch=12, threads=1),
        attestation.score_class(CPU, "nvfp4-emulated", micro_batch=24, threads=2),
        same,
    }
    assert len(others) == 4


def test_a_device_is_named_with_its_instruction_set() -> None:
    assert torch.backends.cpu.get_cpu_capability() in attestation.device_name(CPU)
