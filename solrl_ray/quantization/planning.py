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
    """The plan for each linear of a model."""

    tiers: dict[str, str]
    """Path of each quantised linear → its tier, in module order."""
    skipped: dict[str, str]
    """Path of each linear that is not quantised → why."""


def plan(linears: Mapping[str, Linear], tier: str, scope: QuantizationScope) -> Plan:
    """Which of a model's linears are quantised, and how, if explorers run `tier`. Pure; touches no weight."""
    tiers: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for name, linear in linears.items():
        own, reason = _tier_of(name, linear, tier, scope)
        if reason:
            skipped[name] = reason
        else:
            tiers[name] = own
    return Plan(tiers, skipped)


def _tier_of(name: str, linear: Linear, tier: str, scope: QuantizationScope) -> tuple[str, str]:
    """The tier of one linear, and why it is not quantised, or empty."""
    if tier in UNQUANTIZED_TIERS:
        return tier, f"tier {tier} quantises nothing"
    for part in scope.skip:
        if _matches(name, part):
            return "", f"path matches {part!r}"
    largest = max(linear.in_features, linear.out_features)
    if largest <= scope.min_features:
        return "", f"max(in, out) features {largest} <= min_features {scope.min_features}"
    own, what = tier, f"tier {tier}"
    for part, other in scope.tiers.items():
        if _matches(name, part):
            own, what = other, f"path matches {part!r}, whose tier {other}"
            break
    if own in UNQUANTIZED_TIERS:
        return own, f"{what} quantises nothing"
    inputs, outputs = DIVISORS.get(own, (1, 1))
    if linear.in_features % inputs or linear.out_features % outputs:
        shape = f"{linear.in_features} -> {linear.out_features}"
        return own, f"{shape} does not divide by {inputs} -> {outputs}, which {own} needs"
    return own, ""


def _matches(name: str, part: str) -> bool:
    """Whether a part of a module path is in `name`; after ``^`` it must be at its start.

    This separates FLUX's final ``proj_out`` from the ``proj_out`` of each single block.
    """
    return name.startswith(part[1:]) if part.startswith("^") else part in name


def packed_bytes(format: Format, rows: int, columns: int) -> int:
    """Bytes of a packed weight [rows, columns]: codes and scales, without NVFP4's one amax."""
    if format == "fp8-row":
        return rows * columns + 4 * rows
    padded = -(-columns // K_MULTIPLE) * K_MULTIPLE
    return rows * padded // 2 + rows * padded // BLOCK
