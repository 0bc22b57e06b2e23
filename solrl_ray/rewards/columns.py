"""Several rewards at once: each image is sampled once, whatever it is scored by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.mixture import RewardMixture


class Columns(Reward):
    """Keeps what each reward of a mixture said of the last images; the first one's values are the reward."""

    def __init__(self, mixture: RewardMixture) -> None:
        super().__init__(mixture.name)
        self._mixture = mixture
        self._last: tuple[Tensor, ...] = ()

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self._last = tuple(self._mixture.components(images, prompts).values())
        return self._last[0]

    @property
    def last(self) -> tuple[tuple[float, ...], ...]:
        """Scores of the last images, a column a reward in the order of the configuration."""
        return tuple(tuple(column.tolist()) for column in self._last)
