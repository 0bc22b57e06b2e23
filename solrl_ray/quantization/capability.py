"""The preview tiers that a device can run, and the tier that `auto` selects on it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from solrl_ray.errors import UserError

if TYPE_CHECKING:  # importing torch takes seconds, and a CPU does not need it
    import torch

    Device = torch.device | str

FP8_CAPABILITY = (8, 9)
NVFP4_CAPABILITY = (10, 0)
QUANTIZED_TIERS = ("nvfp4", "fp8", "nvfp4-emulated")
"""Quantised tiers, from the fastest to the slowest."""


def lacks(tier: str, device: Device) -> str:
    """Why `device` cannot run `tier`; empty if it can."""
    if tier == "fp8" and _capability(device) < FP8_CAPABILITY:
        return "fp8 needs a GPU of compute capability 8.9 or newer"
    if tier == "nvfp4" and _capability(device) < NVFP4_CAPABILITY:
        return "nvfp4 needs a GPU of compute capability 10.0 or newer"
    if tier == "nvfp4" and importlib.util.find_spec("transformer_engine") is None:
        return "nvfp4 needs Transformer Engine; install solrl-ray[nvfp4]"
    return ""


def check(tier: str, device: Device) -> None:
    """Raises UserError if `device` cannot run `tier`; the message lists the tiers that it can run."""
    reason = lacks(tier, device)
    if reason:
        raise UserError(
            f"the preview tier {tier} does not run on {device_name(device)}: {reason}. Set "
            f"rollout.explore.precision to {', '.join(available(device))}, or to bf16 or float32 (not quantised)"
        )


def available(device: Device) -> list[str]:
    """The quantised tiers that `device` can run."""
    return [tier for tier in QUANTIZED_TIERS if not lacks(tier, device)]


def resolve(tier: str, device: Device, dtype: str) -> str:
    """The tier that `auto` selects on a device; any other tier is returned unchanged.

    On a GPU: ``nvfp4``, else ``fp8``, else the model's type (`dtype`), because the emulation is slower. On a CPU, where
    speed does not matter: the emulation, so that previews are ranked with the numerics of a GPU.
    """
    if tier != "auto":
        return tier
    if not str(device).startswith("cuda"):
        return "nvfp4-emulated"
    fast = [quantized for quantized in ("nvfp4", "fp8") if not lacks(quantized, device)]
    return fast[0] if fast else {"bfloat16": "bf16", "float32": "float32"}[dtype]


def device_name(device: Device) -> str:
    """Name of a device: ``NVIDIA H200 (sm_90)``, or its type if it is not a GPU."""
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
