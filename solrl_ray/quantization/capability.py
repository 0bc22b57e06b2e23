"""Which tiers a device can run, and what `auto` means there."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from solrl_ray.errors import UserError

if TYPE_CHECKING:  # takes seconds, and is not needed for a CPU
    import torch

    Device = torch.device | str

FP8_CAPABILITY = (8, 9)
NVFP4_CAPABILITY = (10, 0)
QUANTIZED_TIERS = ("nvfp4", "fp8", "nvfp4-emulated")
"""From the fastest to the slowest."""


def lacks(tier: str, device: Device) -> str:
    """Why `device` cannot run `tier`; empty if it can."""
    if tier == "fp8" and _capability(device) < FP8_CAPABILITY:
        return "fp8 needs a card of compute capability 8.9 or newer"
    if tier == "nvfp4" and _capability(device) < NVFP4_CAPABILITY:
        return "nvfp4 needs a card of compute capability 10.0 or newer"
    if tier == "nvfp4" and importlib.util.find_spec("transformer_engine") is None:
        return "nvfp4 needs Transformer Engine, the extra solrl-ray[nvfp4]"
    return ""


def check(tier: str, device: Device) -> None:
    """Raises UserError if `device` cannot run `tier`; it lists the tiers that it can run."""
    reason = lacks(tier, device)
    if reason:
        raise UserError(
            f"the preview tier {tier} does not run on {device_name(device)}: {reason}; there rollout.explore.precision "
            f"may be {', '.join(available(device))}, or unquantised bf16 or float32"
        )


def available(device: Device) -> list[str]:
    """The quantised tiers that `device` can run."""
    return [tier for tier in QUANTIZED_TIERS if not lacks(tier, device)]


def resolve(tier: str, device: Device, dtype: str) -> str:
    """What `auto` means: on a GPU the fastest tier with kernels for it, on a CPU the emulation.

    On a GPU: ``nvfp4``, else ``fp8``, else the model's own type (`dtype`), because the emulation is slower. On CPUs,
    where speed does not matter, ranking has the numerics of a card. Any other tier means itself.
    """
    if tier != "auto":
        return tier
    if not str(device).startswith("cuda"):
        return "nvfp4-emulated"
    fast = [other for other in ("nvfp4", "fp8") if not lacks(other, device)]
    return fast[0] if fast else {"bfloat16": "bf16", "float32": "float32"}[dtype]


def device_name(device: Device) -> str:
    """``NVIDIA H200 (sm_90)``, or the kind of another device."""
    if not str(device).startswith("cuda"):
        return str(device)
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def _capability(device: Device) -> tuple[int, int]:
    if not str(device).startswith("cuda"):
        return 0, 0
    import torch

    return torch.cuda.get_device_capability(device)
