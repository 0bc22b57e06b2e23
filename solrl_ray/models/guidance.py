"""Classifier-free guidance (arXiv 2207.12598): the velocities of a prompt and of a negative prompt become one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from solrl_ray.config.guidance import Cfg
from solrl_ray.records import NEGATIVE
from solrl_ray.sampling.sde import per_sample

Texts = dict[str, Tensor]
"""Tensors by name, each [B, ...]."""
Velocity = Callable[[Tensor, Tensor, Texts], Tensor]
"""(latents, sigmas, texts) → velocity."""


def guided_velocity(
    velocity: Velocity,
    combined: Callable[[Tensor, Tensor, float], Tensor],
    cfg: Cfg,
    latents: Tensor,
    sigmas: Tensor,
    texts: Texts,
    *,
    together: bool,
) -> Tensor:
    """The velocity, float32 [B, *latent_shape]: of the prompts alone where the guidance is off or does not act.

    Args:
        combined: makes one velocity of the prompts', the negative prompt's and the scale.
        texts: those of the negative prompt begin with `NEGATIVE`.
        together: one forward of 2 B, so that a sampler compiles one shape; else two of B, as a learner needs them: no
            activations of the negative prompt are kept, and v_old has the bits of an equal v_theta.

    Raises ValueError if guidance is on and there is no negative prompt.
    """
    own = {name: tensor for name, tensor in texts.items() if not name.startswith(NEGATIVE)}
    if not cfg.is_on:
        return velocity(latents, sigmas, own).float()
    if len(texts) != 2 * len(own):
        raise ValueError("guidance needs the negative prompt, which the embedding lacks")
    negative = {name: texts[NEGATIVE + name] for name in own}
    positive, other = (each.float() for each in _both(velocity, latents, sigmas, own, negative, together=together))
    low, high = cfg.interval
    acts = per_sample((sigmas >= low) & (sigmas <= high), positive)
    return torch.where(acts, combined(positive, other, cfg.scale), positive)


def _both(
    velocity: Velocity, latents: Tensor, sigmas: Tensor, own: Texts, negative: Texts, *, together: bool
) -> tuple[Tensor, Tensor]:
    """The velocities of the prompts and of the negative prompt; the second one never has a gradient."""
    if together:
        texts = {name: torch.cat([tensor, negative[name]]) for name, tensor in own.items()}
        positive, other = velocity(latents.repeat(2, *[1] * (latents.dim() - 1)), sigmas.repeat(2), texts).chunk(2)
        return positive, other.detach()
    # In this order, so that no cast of a weight that autocast may keep was made without gradient.
    positive = velocity(latents, sigmas, own)
    with torch.no_grad():
        return positive, velocity(latents, sigmas, negative)
