"""The interface of a reward: it takes images or videos with their prompts and returns one finite number for each.

Input and output are checked. A reward that uses the prompt's reference images has a parameter named in `SEEN`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError, RewardNonsense
from solrl_ray.models.checkpoint import freeze
from solrl_ray.records import SampleShape

Keys = Callable[[str], str]
"""A field of a reward's configuration → its name in a message: ``path`` → ``rewards[0].path``."""


IMAGES, VIDEOS = 4, 5
"""Dimensions of images [B, 3, H, W], and of videos [B, 3, T, H, W]."""


class Reward(ABC):
    """Subclasses implement `compute`; callers use `score`, which checks input and result."""

    ndims: tuple[int, ...] = (IMAGES,)
    """The inputs it can score: `IMAGES`, `VIDEOS` or both."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name in error messages, e.g. ``rewards[0] (clipscore)``."""
        self._computes_with = wanted_by(self.compute)

    @abstractmethod
    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """One number per image, [B]; see `score` for the arguments. It must depend on this batch alone.

        If it has a parameter named in `SEEN`, it also gets the reference images.
        """

    def take_costs(self) -> dict[str, int]:
        """Costs since the last call, for a reward that uses a server: ``requests``, ``retries``, ``tokens``, …"""
        return {}

    def score_each(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        """`score` as the first column, then the value of each single reward of a mixture: [B, 1 + rewards]."""
        values = self.score(images, prompts, references)
        return torch.stack([values, values], dim=1)

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        """Score images, or videos.

        Args:
            images: float [B, 3, H, W] or [B, 3, T, H, W] in [0, 1]; `ndims` lists the allowed ones.
            prompts: B texts, one per image.
            references: float32 [B, n, 3, H, W] in [0, 1], the reference images of each prompt; None: there are none.

        Returns:
            float32 [B] on the CPU.

        Raises:
            RewardError: `images` is empty or not float, or the reward returned the wrong number of values.
            RewardNonsense: images are out of range, or a value is not finite.
            ValueError: images and prompts do not fit.
        """
        if images.ndim not in self.ndims or images.shape[1] != 3 or len(prompts) != len(images):
            allowed = " or ".join("[B, 3, T, H, W]" if ndim == VIDEOS else "[B, 3, H, W]" for ndim in self.ndims)
            raise ValueError(f"images {tuple(images.shape)} and {len(prompts)} prompts are not {allowed} and B")
        _check_range(self.name, images)
        values = self.compute(images, prompts, **seen(self._computes_with, references))
        if values.shape != (len(images),):
            raise RewardError(
                f"Reward {self.name} returned values of shape {list(values.shape)} for {len(images)} images; "
                f"expected [{len(images)}]."
            )
        values = values.detach().to("cpu", torch.float32, copy=True)  # the user's function may reuse its tensor
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        if bad:
            raise RewardNonsense(
                f"Reward {self.name} returned {values[bad[0]].item()} for {len(bad)} of {len(images)} "
                f"images, first for the prompt {prompts[bad[0]]!r}."
            )
        return values


SEEN = ("reference", "references")
"""Names of parameters that get reference images: ``reference`` the first one of each prompt, float32 [B, 3, H, W] in
[0, 1]; ``references`` all of them, [B, n, 3, H, W]. If the prompts have none: the parameter's default, or else None.
"""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters by name, in order; empty for a function in C without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def wanted_by(function: Callable[..., Any]) -> dict[str, bool]:
    """The names of `SEEN` that are parameters of a function → whether the parameter has a default."""
    declared = parameters(function)
    return {name: declared[name].default is not inspect.Parameter.empty for name in SEEN if name in declared}


def seen(wanted: Mapping[str, bool], references: Tensor | None) -> dict[str, Tensor | None]:
    """The reference images as keyword arguments; `wanted` is the result of `wanted_by`."""
    if references is None:
        return {name: None for name, has_default in wanted.items() if not has_default}
    values = {"reference": references[:, 0], "references": references}
    return {name: values[name] for name in wanted}


class CheckpointReward(Reward):
    """A reward that is made from a configuration entry."""

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        """Load it onto `device`. Raises UserError naming the field whose checkpoint is missing or damaged."""
        super().__init__(name)
        self._device = torch.device(device)

    def _frozen(self, network: nn.Module) -> Any:
        """Move a network to the device, in eval mode and without gradients."""
        return freeze(network).to(self._device)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        """Raise UserError if the reward cannot be loaded or cannot score images of these shapes. Loads no weights."""
        cls.folders(config, keys)

    @classmethod
    def reach(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        """Raise UserError if the server that the reward needs does not answer, or refuses a question. Most need none.

        The only check that contacts an address and sends a token.
        """

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> Any:
        """The folders of its checkpoints; None if it needs none. Raises UserError naming the field of a missing one."""


def _check_range(name: str, images: Tensor) -> None:
    if not images.is_floating_point() or images.numel() == 0:
        raise RewardError(
            f"Reward {name} got images of {images.dtype} and shape {list(images.shape)}; expected floats, "
            "at least one pixel."
        )
    low, high = (bound.item() for bound in images.aminmax())
    if not (low >= 0 and high <= 1):  # NaN too
        raise RewardNonsense(f"Reward {name} got images with values from {low:g} to {high:g}; expected 0 to 1.")
