"""The interface of a reward: images and their prompts in, one finite number an image out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.errors import RewardError


class Reward(ABC):
    """Subclasses write `compute`; callers use `score`, which checks what comes out of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        """How errors call it, e.g. ``rewards[0] (clipscore)``."""

    @abstractmethod
    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """One number an image, [B]; see `score` for the arguments. A function of this batch alone."""

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score images.

        Args:
            images: float32 [B, 3, H, W] in [0, 1].
            prompts: B texts, one an image.

        Returns:
            float32 [B] on the CPU.

        Raises:
            RewardError: the wrong number of values, or one that is not finite.
            ValueError: images and prompts that do not fit.
        """
        if images.ndim != 4 or images.shape[1] != 3 or len(prompts) != len(images):
            raise ValueError(f"images {tuple(images.shape)} and {len(prompts)} prompts are not [B, 3, H, W] and B")
        values = self.compute(images, prompts)
        if values.shape != (len(images),):
            raise RewardError(
                f"Reward {self.name} returned values of shape {list(values.shape)} for {len(images)} images; "
                f"right would be [{len(images)}]."
            )
        values = values.detach().to("cpu", torch.float32)
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        if bad:
            raise RewardError(
                f"Reward {self.name} returned {values[bad[0]].item()} for {len(bad)} of {len(images)} "
                f"images, first for the prompt {prompts[bad[0]]!r}."
            )
        return values
