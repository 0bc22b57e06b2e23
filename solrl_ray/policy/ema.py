"""Exponential moving average of the trained factors; evaluated and saved, never used to sample in training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    """Float32 copies of LoRA factors that follow the trained ones, separate from the model."""

    def __init__(self, factors: Mapping[str, Tensor]) -> None:
        self._factors = {name: factors[name].detach().float().clone() for name in sorted(factors)}

    @property
    def factors(self) -> dict[str, Tensor]:
        """Copies by name, in sorted order."""
        return {name: value.clone() for name, value in self._factors.items()}

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor], decay: float) -> None:
        """e <- e + (1 - decay) · (trained - e), in float32."""
        for name, value in self._factors.items():
            value.add_((trained[name].detach() - value) * (1.0 - decay))
