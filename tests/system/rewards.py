"""Rewards of a user's own: two that fail, for tests of how a run ends then, and two that do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def nan(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    tried = len(set(prompts)) > 1  # before a run; in it, all pictures of a call are of one prompt
    return torch.full((len(prompts),), 0.0 if tried else torch.nan)


def brightness(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def frames(videos: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.full((len(prompts),), float(videos.shape[2]))


def fails(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    raise ValueError("as it should")
