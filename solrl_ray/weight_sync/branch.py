"""A quantised layer that never changes, with the policy's LoRA factors as a live branch beside it.

y = Q(W0) x + b + s·B (A x): an alternative to merging. The base's rounding does not change with the policy, and the
factors are not quantised, at the cost of two small products per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from solrl_ray.common.module_paths import ends_in
from solrl_ray.quantization.layers import QuantizedLinear


class BranchLinear(nn.Module):
    """A `QuantizedLinear` and two factors, zero at first; `load` writes into them in place."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, base: QuantizedLinear, rank: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", torch.zeros(rank, base.in_features, dtype=dtype, device=device))
        self.register_buffer("lora_b", torch.zeros(base.out_features, rank, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] in the factors' type → [..., out] of the same type."""
        low = nn.functional.linear(x, self.lora_a)
        out: torch.Tensor = self.base(x) + nn.functional.linear(low, self.lora_b)
        return out

    @torch.no_grad()
    def load(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        """Overwrites A [rank, in] and s·B [out, rank], which must have this layer's shapes and type."""
        for held, new in ((self.lora_a, lora_a), (self.lora_b, lora_b)):
            if held.shape != new.shape or held.dtype != new.dtype:
                raise ValueError(
                    f"a factor is {new.dtype} {list(new.shape)}, this layer's {held.dtype} {list(held.shape)}"
                )
            held.copy_(new)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything besides its bias that decides the layer's output; not copies."""
        return {**self.base.tensors(), "lora_A": self.lora_a, "lora_B": self.lora_b}


def add_branches(model: nn.Module, targets: Iterable[str], rank: int, dtype: torch.dtype) -> int:
    """Puts a branch beside every quantised layer whose path ends in one of `targets`; returns how many."""
    suffixes = tuple(targets)
    chosen: Mapping[str, QuantizedLinear] = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and ends_in(path, suffixes)
    }
    for path, layer in chosen.items():
        device = next(iter(layer.tensors().values())).device
        model.set_submodule(path, BranchLinear(layer, rank, dtype, device))
    return len(chosen)
