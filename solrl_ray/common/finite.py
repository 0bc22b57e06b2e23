"""Checks tensors for NaN and infinity in one pass; `torch.isfinite` would allocate several tensors of their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name of the first tensor, by name, with NaN or infinity; empty if there is none.

    Waits for the GPU once. All tensors must be on one device.
    """
    extremes = Extremes()
    for name in sorted(tensors):
        extremes.add(name, tensors[name])
    return extremes.first_not_finite()


class Extremes:
    """Minimum and maximum of tensors that are added one by one. It waits for the GPU only at the end."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[torch.Tensor] = []
        """Minimum and maximum of each tensor, in turn."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._names.append(name)
            self._extremes += [extreme.double() for extreme in torch.aminmax(tensor.detach())]  # NaN if any element is

    def first_not_finite(self) -> str:
        """Name of the first added tensor with NaN or infinity; empty if there is none."""
        if not self._names:
            return ""
        finite = torch.isfinite(torch.stack(self._extremes)).view(-1, 2).all(dim=1).tolist()
        return next((name for name, is_finite in zip(self._names, finite, strict=True) if not is_finite), "")
