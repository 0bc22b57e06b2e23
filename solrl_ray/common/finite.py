"""Whether tensors have NaN or infinity, in one pass: `torch.isfinite` allocates several tensors of their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; of any float type, on any device."""
    return not first_not_finite({"it": tensor})


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name of the first tensor, in order of names, with NaN or infinity; empty if there is none.

    Waits for the GPU once. All must be on one device.
    """
    names = [name for name in sorted(tensors) if tensors[name].numel()]
    if not names:
        return ""
    # Both are NaN if an element is.
    extremes = torch.stack([torch.stack(torch.aminmax(tensors[name].detach())).double() for name in names])
    finite = torch.isfinite(extremes).all(dim=1).tolist()
    return next((name for name, each in zip(names, finite, strict=True) if not each), "")
