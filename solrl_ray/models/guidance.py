"""Classifier-free guidance (arXiv 2207.12598): two velocities become one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solrl_ray.config.guidance import Cfg
from solrl_ray.records import NEGATIVE

Conditioning = dict[str, Tensor]
"""Tensors of the texts by name, each [B, ...]."""
Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents, sigmas, conditioning) → velocity."""


def split(embedding: Conditioning) -> tuple[Conditioning, Conditioning]:
    """The tensors of the prompts, and those of the negative prompt by the same names; empty if it is not there."""
    own = {name: tensor for name, tensor in embedding.items() if not name.startswith(NEGATIVE)}
    negative = {name: embedding[NEGATIVE + name] for name in own if NEGATIVE + name in embedding}
    return own, negative


def both(
    velocity: Velocity, latents: Tensor, sigmas: Tensor, own: Conditioning, negative: Conditioning
) -> list[Tensor]:
    """The velocities [B, ...] of the prompts and of the negative prompt; the second one never has a gradient.

    Without gradient it is one forward of 2 B, so that a sampler compiles one shape. With gradient they are two, so
    that no activations of the second are kept.
    """
    if not negative:
        raise ValueError("guidance needs the negative prompt, which the embedding lacks")
    if torch.is_grad_enabled():
        # In this order, so that no cast of a weight that autocast may keep was made without gradient.
        positive = velocity(latents, sigmas, own)
        with torch.no_grad():
            return [positive, velocity(latents, sigmas, negative)]
    texts = {name: torch.cat([own[name], tensor]) for name, tensor in negative.items()}
    twice = velocity(torch.cat([latents, latents]), torch.cat([sigmas, sigmas]), texts)
    return list(twice.chunk(2))


def inside(cfg: Cfg, sigmas: Tensor) -> Tensor:
    """Which noise levels [B] the guidance acts at."""
    low, high = cfg.interval
    return (sigmas >= low) & (sigmas <= high)
