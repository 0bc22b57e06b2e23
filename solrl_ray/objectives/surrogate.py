"""The clipped surrogate of policy-gradient methods with several updates on one set of samples (PPO, GRPO)."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor, Tensor]:
    """Per sample max(-A rho, -A clip(rho, 1 ± clip_range)), and with it rho and whether rho is outside.

    Args:
        log_ratio: log rho = log p_theta - log p_old, [batch]; gradient passes through it.
        advantages: A, [batch].

    Returns:
        (loss, rho, outside), each [batch] and of log_ratio's dtype; `outside` is 0 or 1. The last two have no
        gradient.

    Source: proximal policy optimisation (arXiv 1707.06347), equation 7.
    """
    ratio = torch.exp(log_ratio)
    gains = advantages.to(ratio.dtype)
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
    outside = (ratio.detach() != bounded.detach()).to(ratio.dtype)
    return torch.maximum(-gains * ratio, -gains * bounded), ratio.detach(), outside
