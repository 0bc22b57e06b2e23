"""Rewards of a user's own: some that fail, for tests of how a run ends then, and one that does not.

`nan` and `one_too_few` stand the trial before a run, so that they fail in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from solrl_ray.rewards import trial


def nan(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.full((len(prompts),), 0.0 if tried(prompts) else torch.nan)


def one_too_few(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return torch.zeros(len(prompts) - (not tried(prompts)))


def brightness(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def fails(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    raise ValueError("as it should")


def tried(prompts: Sequence[str]) -> bool:
    return tuple(prompts) == trial.PROMPTS
