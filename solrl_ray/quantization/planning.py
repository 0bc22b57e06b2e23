"""Which linears are quantised, to which format, and their sizes: computed from shapes, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.config.strategies import UNQUANTIZED_TIERS

Format = Literal["nvfp4", "fp8-row"]
FORMAT_OF_TIER: dict[str, Format] = {"nvfp4": "nvfp4", "nvfp4-emulated": "nvfp4", "fp8": "fp8-row"}
"""Tier → weight format of its layers. Other tiers quantise nothing."""
BLOCK = 16
"""Number of elements along K that share a block scale in NVFP4."""
K_MULTIPLE = 32
"""FP4 matrix products need K to be a multiple of this; rows are padded with zeros."""
DIVISORS = {"fp8": (16, 16), "nvfp4": (32, 16)}
"""Tier → divisors of in_features and out_features that its matrix product requires. The emulation pads instead."""


class Linear(Protocol):
    """A linear, or its shape."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The linears of a model that a tier quantises, and those that it skips."""

    quantized: tuple[str, ...]
    """Paths of the quantised linears, in module order."""
    skipped: dict[str, str]
    """Path of each linear that is not quantised → why."""


def plan(linears: Mapping[str, Linear], tier: str, scope: QuantizationScope) -> Plan:
    """Select the linears to quantise if explorers run `tier`. A pure function: it reads no weights."""
    reasons = {name: _reason(name, linear, tier, scope) for name, linear in linears.items()}
    quantized = tuple(name for name, reason in reasons.items() if not reason)
    return Plan(quantized, {name: reason for name, reason in reasons.items() if reason})


def _reason(name: str, linear: Linear, tier: str, scope: QuantizationScope) -> str:
    """Why a linear is not quantised; empty if it is."""
    if tier in UNQUANTIZED_TIERS:
        return f"tier {tier} quantises nothing"
    for part in scope.skip:  # ``^`` tells FLUX's final ``proj_out`` from the ``proj_out`` of each single block
        if name.startswith(part[1:]) if part.startswith("^") else part in name:
            return f"path matches {part!r}"
    largest = max(linear.in_features, linear.out_features)
    if largest <= scope.min_features:
        return f"max(in, out) features {largest} <= min_features {scope.min_features}"
    inputs, outputs = DIVISORS.get(tier, (1, 1))
    if linear.in_features % inputs or linear.out_features % outputs:
        shape = f"{linear.in_features} -> {linear.out_features}"
        return f"{shape} is not divisible by {inputs} -> {outputs}, which {tier} needs"
    return ""


def packed_bytes(format: Format, rows: int, columns: int) -> int:
    """Size of a packed weight [rows, columns] in bytes: codes and scales, without the single amax of NVFP4."""
    if format == "fp8-row":
        return rows * columns + 4 * rows
    padded = -(-columns // K_MULTIPLE) * K_MULTIPLE
    return rows * padded // 2 + rows * padded // BLOCK
