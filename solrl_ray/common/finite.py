"""Whether tensors have NaN or infinity, in one pass: `torch.isfinite` allocates several tensors of their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Name of the first tensor, in order of names, with NaN or infinity; empty if there is none.

    Waits for the GPU once. All must be on one device.
    """
    extremes = Extremes()
    for name in sorted(tensors):
        extremes.add(name, tensors[name])
    return extremes.first_not_finite()


class Extremes:
    """Least and largest elements of tensors that come one after another; a GPU is waited for at the end."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._found: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._names.append(name)
            self._found += [each.double() for each in torch.aminmax(tensor.detach())]  # NaN if an element is

    def first_not_finite(self) -> str:
        """Name of the first one with NaN or infinity; empty if there is none."""
        if not self._names:
            return ""
        finite = torch.isfinite(torch.stack(self._found)).view(-1, 2).all(dim=1).tolist()
        return next((name for name, each in zip(self._names, finite, strict=True) if not each), "")
