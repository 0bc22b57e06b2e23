"""`quantize_`: replaces the linears that `planning.py` selects by those of a tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.config.strategies import UNQUANTIZED_TIERS
from solrl_ray.errors import UserError
from solrl_ray.quantization import capability
from solrl_ray.quantization.activations import ActivationQuantizer
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.fp8_linear import FP8Linear
from solrl_ray.quantization.layers import QuantizedLinear
from solrl_ray.quantization.planning import Plan, plan
from solrl_ray.quantization.transformer_engine import EngineNVFP4Linear

LAYERS: dict[str, type[QuantizedLinear]] = {
    "nvfp4": EngineNVFP4Linear,
    "fp8": FP8Linear,
    "nvfp4-emulated": EmulatedNVFP4Linear,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """Which layers of a model `quantize_` replaced, and which it skipped."""

    tier: str
    layers: tuple[str, ...]
    """Module paths of the replaced linears, in module order."""
    skipped: dict[str, str]
    """Module path of each linear that is not quantised → why."""
    quantized_parameters: int
    """Number of weights in the tier's format. These layers cost twice that many FLOPs per row of activations."""
    skipped_parameters: int
    """Number of weights in the skipped linears."""

    @classmethod
    def of(cls, tier: str, planned: Plan, linears: Mapping[str, nn.Linear]) -> QuantizationReport:
        """The report for a model with these `linears` after `planned` was carried out."""
        return cls(
            tier=tier,
            layers=planned.quantized,
            skipped=planned.skipped,
            quantized_parameters=sum(linears[name].weight.numel() for name in planned.quantized),
            skipped_parameters=sum(linears[name].weight.numel() for name in planned.skipped),
        )

    def sentence(self) -> str:
        """``of 494 linears 418 in fp8: 72.7 % of 11,840,000,000 weights; skipped: 76 path matches 'norm'``."""
        total = self.quantized_parameters + self.skipped_parameters
        share = 100 * self.quantized_parameters / total if total else 0.0
        quantized = f"{len(self.layers)} in {self.tier}" if self.layers else "none quantised"
        reasons = Counter(self.skipped.values()).most_common()
        why = ", ".join(f"{count} {reason}" for reason, count in reasons) or "none"
        return (
            f"of {len(self.layers) + len(self.skipped)} linears {quantized}: {share:.1f} % of {total:,} weights; "
            f"skipped: {why}"
        )


def quantize_(
    model: nn.Module,
    tier: str,
    scope: QuantizationScope,
    *,
    device: torch.device | None = None,
    without_kernels: bool = False,
    after: Callable[[str, QuantizedLinear], None] | None = None,
) -> QuantizationReport:
    """Replaces, in place, each `nn.Linear` inside the scope by a linear of the tier.

    Weights are rounded to bfloat16 and quantised as in revision 0. The model must already have its final dtype. The new
    emulated layers share one activation quantiser.

    Args:
        device: moves the model to this device layer by layer, so that a GPU never holds all of it in full precision.
            None: the model stays on its device.
        without_kernels: allow tiers for which the device has no kernels; they run on a slow reference path, as in tests
            on a CPU.
        after: called with the path and the new layer after each linear is quantised, before the next one.

    Raises:
        UserError: the device cannot run the tier, or the scope leaves no linear to quantise.
        ValueError: a weight has NaN or Inf.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    planned = plan(linears, tier, scope)
    if not planned.quantized and tier not in UNQUANTIZED_TIERS:
        raise UserError(
            f"model.quantization leaves none of the model's {len(linears)} linears to quantise to {tier}: "
            f"shorten `skip` ({scope.skip}) or lower `min_features` ({scope.min_features})"
        )
    device = device or next(model.parameters()).device
    if not without_kernels and planned.quantized:
        capability.check(tier, device)
    report = QuantizationReport.of(tier, planned, linears)
    quantizer, layers = ActivationQuantizer(), dict[str, QuantizedLinear]()
    for name in planned.quantized:
        layer = layers[name] = LAYERS[tier].from_linear(linears.pop(name).to(device))
        if isinstance(layer, EmulatedNVFP4Linear):
            layer.quantizer = quantizer  # for other tiers, the compiler shares the quantisation
        model.set_submodule(name, nn.Identity())  # frees the linear before the next one is quantised
        if after is not None:
            after(name, layer)
    model.to(device)
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return report


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Module path → quantised layer of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
