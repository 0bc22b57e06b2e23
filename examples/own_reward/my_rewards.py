"""A custom reward: how red an image is.

solrl train demo --set "rewards=[{kind: 'examples/own_reward/my_rewards.py:redder'}]" --set run.name=red
"""

from __future__ import annotations

from torch import Tensor


def redder(images: Tensor, prompts: list[str]) -> Tensor:
    """Red minus the mean of green and blue: one number per image. Images are float32 [B, 3, H, W] in 0 … 1."""
    red, green, blue = images.mean(dim=(2, 3)).unbind(dim=1)
    return red - (green + blue) / 2
