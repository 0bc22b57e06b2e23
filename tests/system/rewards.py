"""Rewards of a user's own: some that fail, for tests of how a run ends then, and one that does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def nan(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.full((len(prompts),), torch.nan)


def one_too_few(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.zeros(len(prompts) - 1)


def brightness(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))
