"""The form of GELU that compiled, quantised explorers use: the same values, at the same places."""

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import activations
from torch import nn

from solrl_ray.config.schema import Compile, QuantizationScope
from solrl_ray.models.compilation import compile_
from solrl_ray.quantization.gelu import SigmoidGELU, sigmoid_gelu, use_sigmoid_gelu_
from solrl_ray.quantization.scope import quantize_
from tests.unit.quantization.test_scope import SKIP, inputs, transformer

CPU = torch.device("cpu")


def test_it_is_the_tanh_approximation_to_float32s_precision() -> None:
    x = torch.cat([torch.linspace(-12, 12, 48001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])
    wanted = F.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(sigmoid_gelu(x).double(), wanted, rtol=1e-5, atol=1e-6)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    wanted = F.gelu(every.double(), approximate="tanh")
    # Half a unit in bfloat16's last place is the rounding itself.
    torch.testing.assert_close(sigmoid_gelu(every).double(), wanted, rtol=2.0**-8 * 1.02, atol=1e-6)


def test_not_a_number_stays_one() -> None:
    assert sigmoid_gelu(torch.tensor([torch.nan])).isnan().all()


def test_only_tanh_gelus_are_replaced_and_paths_stay() -> None:
    model = transformer()
    names, before = [name for name, _ in model.named_parameters()], model(**inputs()).sample
    assert use_sigmoid_gelu_(model) == 3  # a double block's two feed-forwards, a single block
    assert [name for name, _ in model.named_parameters()] == names
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(SigmoidGELU) == 3
    torch.testing.assert_close(model(**inputs()).sample, before, rtol=1e-4, atol=1e-5)
    exact = nn.Sequential(nn.GELU(), activations.GELU(4, 4), nn.GELU(approximate="tanh"))
    assert use_sigmoid_gelu_(exact) == 1
    assert isinstance(exact[0], nn.GELU)
    assert isinstance(exact[1], activations.GELU)


@pytest.mark.parametrize(("tier", "replaced"), [("fp8", True), ("float32", False), ("nvfp4-emulated", False)])
def test_compiled_explorers_have_it_and_nobody_else(tier: str, replaced: bool) -> None:
    model = copy.deepcopy(transformer()).to(torch.float32)
    quantize_(model, tier, QuantizationScope(skip=SKIP, min_features=0), without_kernels=True)
    compile_(model, Compile(enabled=True), CPU, tier)
    assert any(isinstance(module, SigmoidGELU) for module in model.modules()) is replaced
