"""Reward without a network: whether an image shows the scene of its caption. Used to check a learned reward.

A policy can raise a learned reward in unwanted ways (reward hacking). This reward compares an image with drawings: of
the caption's scene, and of that scene with one word replaced by another of its kind, each drawn at the position that
fits the image best. The best replacement is kept, and the search repeats until no replacement improves the fit. The
reward counts the words of the caption that remain. Use it as a reward of kind
``solrl_ray.testbed.rules:words_that_hold``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solrl_ray.testbed.world import FIELD_VALUES, JITTERS, Scene, parse, render

GRID = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Values tried for each free parameter of a drawing (position and size)."""
SWEEPS = 2
"""How many times each parameter is optimised, with the others at their best values so far."""


def words_that_hold(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Share of the caption's words that are true for the image.

    Args:
        images: float [B, 3, 32, 32] in [0, 1], on any device.
        prompts: B captions of the testbed.

    Returns:
        float32 [B] in [0, 1], on the CPU: the share of 4 words (size, colour, shape, background) if the caption has one
        object, else of 8.

    Raises ValueError if a prompt is not a caption of the testbed.
    """
    on_cpu = images.float().cpu()  # scenes are drawn on the CPU
    return torch.stack([_share(image, parse(prompt)) for image, prompt in zip(on_cpu, prompts, strict=True)])


def _share(image: Tensor, scene: Scene) -> Tensor:
    """Share of the scene's words that are true for `image` [3, 32, 32]."""
    caption = shown = torch.tensor(scene.fields)
    while True:
        drawn = _exchanged(shown)
        best = drawn[_misfits(image, drawn).argmin()]
        if torch.equal(best, shown):
            break
        shown = best
    words = 8 if scene.fields[0] == 2 else 4  # with one object, relation and second object are 0 in both
    return 1 - (shown != caption).sum() / words


def _exchanged(fields: Tensor) -> Tensor:
    """A scene [9], followed by all scenes that differ from it in one word: int64 [N, 9]."""
    rows = [fields]
    for column, words in enumerate(FIELD_VALUES, start=1):
        if fields[0] == 1 and 4 <= column <= 7:  # relation and second object
            continue
        for index in range(len(words)):
            if index != fields[column]:
                rows.append(fields.index_fill(0, torch.tensor(column), index))
    return torch.stack(rows)


def _misfits(image: Tensor, drawn: Tensor) -> Tensor:
    """Mean squared difference of `image` [3, 32, 32] to each scene [N, 9], drawn where it fits best: float32 [N]."""
    tried = torch.tensor(GRID)
    best = torch.full((len(drawn), JITTERS), 0.5)
    best_misfits = torch.full((len(drawn),), torch.inf)
    for number in [*range(JITTERS - 1)] * SWEEPS:  # the last one has no effect
        jitter = best[:, None].repeat(1, len(GRID), 1)
        jitter[:, :, number] = tried
        images = render(drawn.repeat_interleave(len(GRID), 0), jitter.flatten(0, 1))
        misfits = (images - image).square().mean(dim=(1, 2, 3)).view(len(drawn), len(GRID))
        best_misfits, choice = misfits.min(dim=1)
        best[:, number] = tried[choice]
    return best_misfits
