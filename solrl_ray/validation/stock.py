"""The stock diffusers pipeline, observed: its scheduler's input at each step, and the final picture."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.models import paths
from solrl_ray.models.base import DTYPES, DiffusionModel
from solrl_ray.models.stock_call import stock_call
from solrl_ray.validation.session import StockRun

ROUNDS_TIMESTEPS = ("flux", "flux2_klein", "qwen_image")
"""Families whose stock pipeline rounds 1000 sigma to the transformer's dtype and then divides; ours rounds sigma."""
SCHEDULER = "FlowMatchEulerDiscreteScheduler"


def run(
    config: Model, path: str, device: torch.device, text: str, bare: DiffusionModel, noise: Tensor, steps: int
) -> StockRun:
    """Load the stock pipeline, draw one picture and free it.

    Args:
        bare: our model without components, for the shape of its latents.
        noise: initial latents, float32 [1, *latent_shape] as ours.
    """
    pipeline, replaced = _load(config, path, device)
    scheduler = pipeline.scheduler
    states: list[Tensor] = []
    velocities: list[Tensor] = []
    ends: list[Tensor] = []
    step = scheduler.step

    @functools.wraps(step)  # pipelines inspect its parameters
    def watched(model_output: Tensor, timestep: Tensor, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        states.append(sample.float().cpu())
        velocities.append(model_output.float().cpu())
        given = step(model_output, timestep, sample, *args, **kwargs)
        ends.append(given[0].float().cpu())
        return given

    scheduler.step = watched
    images = pipeline(
        prompt=[text],
        latents=_as_given(config.family, noise.clone(), bare),
        output_type="pt",
        **stock_call(config, steps),
    ).images
    return StockRun(
        scheduler=type(scheduler).__name__,
        replaced=replaced,
        sigmas=tuple(scheduler.sigmas.double().tolist()),
        states=tuple(states),
        velocities=tuple(velocities),
        final=ends[-1],
        picture=images.float().cpu(),
    )


def rounded_sigma(config: Model, sigma: float) -> float:
    """The noise level that the stock pipeline's transformer gets."""
    if config.family not in ROUNDS_TIMESTEPS:
        return sigma
    timestep = torch.tensor(1000 * sigma, dtype=torch.float32).to(DTYPES[config.dtype])
    return float(timestep / 1000)


def _load(config: Model, path: str, device: torch.device) -> tuple[Any, str]:
    """The pipeline, and the name of its scheduler if it had to be replaced."""
    import diffusers  # late: it takes seconds

    source = str(paths.checkpoint(path, "model.path"))
    pipeline = models.family(config).PIPELINE.from_pretrained(source, dtype=DTYPES[config.dtype])
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    if device.type == "cuda":
        # One part at a time, so that it needs no more memory than ours.
        pipeline.enable_model_cpu_offload(device=device)
    own = type(pipeline.scheduler).__name__
    if own == SCHEDULER:
        return pipeline, ""
    # Both sides must take Euler steps on one grid; a multistep solver would give another picture.
    shift = float(pipeline.scheduler.config.get("flow_shift") or 1.0)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    return pipeline, own


def _as_given(family: str, latents: Tensor, bare: DiffusionModel) -> Tensor:
    """Our latents in the stock call's format: FLUX.2 packs them itself."""
    if family != "flux2_klein":
        return latents
    side = round(bare.image_tokens**0.5)
    return latents.transpose(1, 2).unflatten(2, (side, side))
