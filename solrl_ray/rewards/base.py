"""The interface of a reward: images or videos and their prompts in, one finite number for each out; both are checked.

A reward that also wants the prompt's reference pictures has a parameter of that name.
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
    """Subclasses write `compute`; callers use `score`, which checks the result."""

    ndims: tuple[int, ...] = (IMAGES,)
    """What it scores: `IMAGES`, `VIDEOS` or both."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The name in errors, e.g. ``rewards[0] (clipscore)``."""
        self._computes_with = wanted_by(self.compute)

    @abstractmethod
    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """One number an image, [B]; see `score` for the arguments. A function of this batch alone.

        With a parameter of a name in `SEEN` it also gets the reference pictures.
        """

    def take_costs(self) -> dict[str, int]:
        """Costs since the last call, for a reward that asks a server: ``requests``, ``retries``, ``tokens``, …"""
        return {}

    def score_each(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        """`score`, followed by each reward's own value in a sum of several: [B, 1 + rewards]. See `score`."""
        values = self.score(images, prompts, references)
        return torch.stack([values, values], dim=1)

    @torch.no_grad()
    def score(self, images: Tensor, prompts: Sequence[str], references: Tensor | None = None) -> Tensor:
        """Score images, or videos.

        Args:
            images: float [B, 3, H, W] or [B, 3, T, H, W] in [0, 1], as `ndims` says.
            prompts: B texts, one an image.
            references: float32 [B, n, 3, H, W] in [0, 1], the pictures of each prompt; None: they have none.

        Returns:
            float32 [B] on the CPU.

        Raises:
            RewardError: no images, or none of floats; the wrong number of values.
            RewardNonsense: images of another range, or a value that is not finite.
            ValueError: images and prompts that do not fit.
        """
        if images.ndim not in self.ndims or images.shape[1] != 3 or len(prompts) != len(images):
            right = " or ".join("[B, 3, T, H, W]" if each == VIDEOS else "[B, 3, H, W]" for each in self.ndims)
            raise ValueError(f"images {tuple(images.shape)} and {len(prompts)} prompts are not {right} and B")
        _check_range(self.name, images)
        values = self.compute(images, prompts, **seen(self._computes_with, references))
        if values.shape != (len(images),):
            raise RewardError(
                f"Reward {self.name} returned values of shape {list(values.shape)} for {len(images)} images; "
                f"right would be [{len(images)}]."
            )
        values = values.detach().to("cpu", torch.float32, copy=True)  # the user's function may use its own again
        bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
        if bad:
            raise RewardNonsense(
                f"Reward {self.name} returned {values[bad[0]].item()} for {len(bad)} of {len(images)} "
                f"images, first for the prompt {prompts[bad[0]]!r}."
            )
        return values


SEEN = ("reference", "references")
"""Names of parameters that get reference pictures: each prompt's first one, float32 [B, 3, H, W] in [0, 1], or all of
them, [B, n, 3, H, W]. If the prompts have none: the parameter's default, or None without one.
"""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """By name, in order; none of a function that is written in C and does not tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def wanted_by(function: Callable[..., Any]) -> dict[str, bool]:
    """Which of `SEEN` are parameters of a function, and whether they have a default."""
    found = parameters(function)
    return {name: found[name].default is not inspect.Parameter.empty for name in SEEN if name in found}


def seen(wanted: Mapping[str, bool], references: Tensor | None) -> dict[str, Tensor | None]:
    """Arguments by the names in `wanted`, as `wanted_by` tells of a function."""
    if references is None:
        return {name: None for name, has_default in wanted.items() if not has_default}
    values = {"reference": references[:, 0], "references": references}
    return {name: values[name] for name in wanted}


class CheckpointReward(Reward):
    """A reward that a configuration names."""

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        """Load it onto `device`. Raises `UserError` naming the field whose checkpoint is missing or damaged."""
        super().__init__(name)
        self._device = torch.device(device)

    def _frozen(self, network: nn.Module) -> Any:
        """A network on the device, in eval mode and without gradients."""
        return freeze(network).to(self._device)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        """Raise `UserError` if it cannot be loaded or cannot take images of these shapes. Loads no weights."""
        cls.folders(config, keys)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> Any:
        """Where its checkpoints are; None if it needs none. Raises `UserError` naming the field of a missing one."""


def _check_range(name: str, images: Tensor) -> None:
    if not images.is_floating_point() or images.numel() == 0:
        raise RewardError(
            f"Reward {name} got images of {images.dtype} and shape {list(images.shape)}; right would be floats, "
            "at least one pixel."
        )
    low, high = (bound.item() for bound in images.aminmax())
    if not (low >= 0 and high <= 1):  # NaN too
        raise RewardNonsense(f"Reward {name} got images with values from {low:g} to {high:g}; right would be 0 to 1.")
