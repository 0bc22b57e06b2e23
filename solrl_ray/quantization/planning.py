"""Which linears are quantised, to what, and their sizes: from their shapes alone, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from solrl_ray.config.schema import QuantizationScope
from solrl_ray.config.strategies import UNQUANTIZED_TIERS

Format = Literal["nvfp4", "fp8-row"]
FORMAT_OF_TIER: dict[str, Format] = {"nvfp4": "nvfp4", "nvfp4-emulated": "nvfp4", "fp8": "fp8-row"}
"""The weight format of a tier's layers. A tier that is not here quantises nothing."""
BLOCK = 16
"""Elements of NVFP4 that share a block scale, along K."""
K_MULTIPLE = 32
"""FP4 matrix products need K in multiples of this; shorter rows are padded with zeros."""
DIVISORS = {"fp8": (16, 16), "nvfp4": (32, 16)}
"""Tier → required divisors of in_features and out_features, for its matrix product; the emulation pads."""


class Linear(Protocol):
    """A linear, or its shape."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    quantized: tuple[str, ...]
    """Paths of the linears that are quantised, in module order."""
    skipped: dict[str, str]
    """Path of each linear that is not → why."""


def plan(linears: Mapping[str, Linear], tier: str, scope: QuantizationScope) -> Plan:
    """Which of a model's linears are quantised if explorers run `tier`. Pure; touches no weight."""
    reasons = {name: _reason(name, linear, tier, scope) for name, linear in linears.items()}
    quantized = tuple(name for name, reason in reasons.items() if not reason)
    return Plan(quantized, {name: reason for name, reason in reasons.items() if reason})


def _reason(name: str, linear: Linear, tier: str, scope: QuantizationScope) -> str:
    """Why one linear is not quantised; empty if it is."""
    if tier in UNQUANTIZED_TIERS:
        return f"tier {tier} quantises nothing"
    for part in scope.skip:  # ``^`` separates FLUX's final ``proj_out`` from the ``proj_out`` of each single block
        if name.startswith(part[1:]) if part.startswith("^") else part in name:
            return f"path matches {part!r}"
    largest = max(linear.in_features, linear.out_features)
    if largest <= scope.min_features:
        return f"max(in, out) features {largest} <= min_features {scope.min_features}"
    inputs, outputs = DIVISORS.get(tier, (1, 1))
    if linear.in_features % inputs or linear.out_features % outputs:
        shape = f"{linear.in_features} -> {linear.out_features}"
        return f"{shape} does not divide by {inputs} -> {outputs}, which {tier} needs"
    return ""


def packed_bytes(format: Format, rows: int, columns: int) -> int:
    """Bytes of a packed weight [rows, columns]: codes and scales, without NVFP4's one amax."""
    if format == "fp8-row":
        return rows * columns + 4 * rows
    padded = -(-columns // K_MULTIPLE) * K_MULTIPLE
    return rows * padded // 2 + rows * padded // BLOCK
