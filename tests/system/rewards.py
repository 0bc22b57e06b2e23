"""Rewards of a user's own: some that fail, for tests of how a run ends then, and one that does not.

Those that fail stand the trial before a run, which shows them two pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TRIED = 2


def nan(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.full((len(prompts),), torch.nan if len(prompts) > TRIED else 0.0)


def one_too_few(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.zeros(len(prompts) - (len(prompts) > TRIED))


def brightness(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def fails(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    raise ValueError("as it should")
