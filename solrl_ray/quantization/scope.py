"""Which linears of a model are quantised, and the one verb that does it: `quantize_`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.errors import UserError
from solrl_ray.quantization.activations import ActivationQuantizer
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear

UNQUANTIZED_TIERS = ("float32", "bf16")
TIERS = (*UNQUANTIZED_TIERS, "nvfp4-emulated")
"""The tiers that this version runs, on every device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What `quantize_` did to a model."""

    tier: str
    layers: tuple[str, ...]
    """Module paths that were replaced, in module order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Module path of each linear that stays as it is → why."""
    quantized_parameters: int = 0
    """Weights held in the tier's format."""
    skipped_parameters: int = 0
    """Weights of the skipped linears."""


def quantize_(model: nn.Module, tier: str, scope: QuantizationScope) -> QuantizationReport:
    """Replaces, in place, every `nn.Linear` inside the scope by the tier's linear.

    The weights are rounded to bfloat16 and quantised with their frozen amax (`emulation.frozen_amax`). The
    model must already be on its device and in its type. The new layers share one activation quantiser.

    Raises:
        UserError: the tier is not one of this version's, or the scope leaves no linear to quantise.
        ValueError: the model carries PEFT adapters (quantise the plain transformer), or a weight is not
        finite.
    """
    if tier not in TIERS:
        raise UserError(f"rollout.preview.precision is {tier!r}, but this version runs only {', '.join(TIERS)}")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wrapped = [name for name in linears if name.endswith(".base_layer")]
    if wrapped:
        raise ValueError(f"cannot quantise a model with adapters attached, such as {wrapped[0]!r}")
    if tier in UNQUANTIZED_TIERS:
        skipped = dict.fromkeys(linears, f"tier {tier} quantises nothing")
        return QuantizationReport(tier=tier, layers=(), skipped=skipped, skipped_parameters=_size(linears.values()))

    reasons = {name: skip_reason(name, linear, scope) for name, linear in linears.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    chosen = {name: linear for name, linear in linears.items() if name not in skipped}
    if not chosen:
        raise UserError(
            f"model.quantization leaves none of the model's {len(linears)} linears to quantise to {tier}: "
            f"shorten `skip` ({scope.skip}) or lower `min_features` ({scope.min_features})"
        )
    quantizer = ActivationQuantizer()
    for name, linear in chosen.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, EmulatedNVFP4Linear.from_linear(linear, quantizer))
    return QuantizationReport(
        tier=tier,
        layers=tuple(chosen),
        skipped=skipped,
        quantized_parameters=_size(chosen.values()),
        skipped_parameters=_size(linears[name] for name in skipped),
    )


def skip_reason(name: str, linear: nn.Linear, scope: QuantizationScope) -> str:
    """Why the scope leaves this linear unquantised; empty if it does not.

    An entry of `scope.skip` is a substring of the module path; after ``^`` it must be at the path's start,
    which is how FLUX's final ``proj_out`` is told from the ``proj_out`` of each single block.
    """
    for part in scope.skip:
        if name.startswith(part[1:]) if part.startswith("^") else part in name:
            return f"path matches {part!r}"
    largest = max(linear.in_features, linear.out_features)
    if largest <= scope.min_features:
        return f"max(in, out) features {largest} <= min_features {scope.min_features}"
    return ""


def quantized_layers(model: nn.Module) -> dict[str, EmulatedNVFP4Linear]:
    """The quantised layers that a model really contains, by module path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EmulatedNVFP4Linear)}


def _size(linears: Iterable[nn.Linear]) -> int:
    return sum(linear.weight.numel() for linear in linears)
