"""Trains the testbed's transformer and text encoders: flow matching, then rectification.

x_t = (1 - t) x0 + t noise; the velocity's target is noise - x0; the timestep is t in [0, 1] and the guidance input is
1, as in `FluxPipeline`. The final weights are an exponential moving average of the last steps.

1. *Flow matching* on the world's pictures. Deliberately imperfect: words of the captions are replaced at random, so the
   model draws recognisable scenes that often differ from the prompt, which leaves room for reinforcement learning.
2. *Rectification* (rectified flow, arXiv 2209.03003): the model's own pairs of noise and picture are learned again,
   with weights disturbed as NVFP4 rounding would. Then this narrow network behaves as wide production models do: a
   picture depends on the seed far more than on steps and precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import FluxPipeline
from testbed_assets.captions import corrupt, draw, token_ids
from testbed_assets.networks import Optimizer, Training, bfloat16, draw_pictures, without_meanings
from torch import Tensor, nn

from solrl_ray.config.schema import SigmaSchedule
from solrl_ray.quantization.formats import frozen_amax, pack
from solrl_ray.quantization.nvfp4 import NVFP4Tensor
from solrl_ray.sampling import schedules, solvers
from solrl_ray.testbed.world import RESOLUTION

IMAGE_TOKENS = 64
SCHEDULE = SigmaSchedule(kind="flux")
PAIR_STEPS = 20
"""Euler steps with which rectification draws its pairs."""


@dataclass(frozen=True, slots=True)
class Batch:
    x0: Tensor
    """Clean latents, packed: [B, 64, 16]."""
    noise: Tensor
    t: Tensor
    captions: Tensor
    """Scenes that the model reads: int64 [B, 9]."""


def train_flow(
    pipeline: FluxPipeline,
    training: Training,
    *,
    pictures: int,
    corruption: float,
    heldout: Tensor,
    device: torch.device,
) -> dict[str, float]:
    """Flow matching on `pictures` pictures of the world, in place.

    At each visit, each word of a caption is replaced with probability `corruption`. Scenes that mean one of `heldout`
    (int64 [B], see `captions.meaning`) are never shown.
    """
    generator = torch.Generator(device).manual_seed(training.seed)
    scenes = without_meanings(draw(pictures, generator), heldout.to(device))
    latents = _encode(pipeline, scenes, generator)

    def batch() -> Batch:
        rows = torch.randint(len(latents), (training.batch,), device=device, generator=generator)
        noise = torch.randn(training.batch, *latents.shape[1:], device=device, generator=generator)
        t = _logit_normal(training.batch, generator)
        return Batch(latents[rows], noise, t, corrupt(scenes[rows], corruption, generator))

    return _fit(pipeline, training, batch, None, device)


def rectify(
    pipeline: FluxPipeline, training: Training, *, pairs: int, heldout: Tensor, device: torch.device
) -> dict[str, float]:
    """Learns `pairs` of the pipeline's own pairs of noise and latent, with `_RoundingNoise`, in place."""
    generator = torch.Generator(device).manual_seed(training.seed)
    scenes = without_meanings(draw(pairs, generator), heldout.to(device))
    for module in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2):
        module.to(device).eval()
    noise = torch.randn(pairs, IMAGE_TOKENS, 16, device=device, generator=generator)
    latents = _sample(pipeline, scenes, noise, device)
    (shift,) = schedules.sigmas(SCHEDULE, 2, IMAGE_TOKENS)[1:2].tolist()

    def batch() -> Batch:
        rows = torch.randint(pairs, (training.batch,), device=device, generator=generator)
        t = torch.rand(training.batch, device=device, generator=generator)
        # The sampler's grid, made continuous: its middle step of two lies at `shift`.
        t = shift * t / (1 - shift + (2 * shift - 1) * t)
        return Batch(latents[rows], noise[rows], t, scenes[rows])

    disturbance = _RoundingNoise(pipeline.transformer, generator)
    return _fit(pipeline, training, batch, disturbance, device)


class _RoundingNoise:
    """Moves the weights of the blocks' linears by their NVFP4 rounding errors with random signs.

    Skips adaLN modulation, which is never quantised.
    """

    def __init__(self, transformer: nn.Module, generator: torch.Generator) -> None:
        self._weights = [
            module.weight.data
            for name, module in transformer.named_modules()
            if isinstance(module, nn.Linear) and "blocks" in name and "norm" not in name
        ]
        self._generator = generator
        self._uses = 0

    def add(self) -> None:
        if self._uses % 10 == 0:
            packed = [NVFP4Tensor(**pack("nvfp4", weight, frozen_amax(weight))) for weight in self._weights]
            errors = [made.dequantize() - weight for made, weight in zip(packed, self._weights, strict=True)]
            self._errors = torch.cat([error.flatten() for error in errors])
        self._uses += 1
        self._saved = [weight.clone() for weight in self._weights]
        device = self._errors.device
        signs = torch.randint(2, self._errors.shape, device=device, generator=self._generator) * 2 - 1
        parts = (self._errors * signs).split([weight.numel() for weight in self._weights])
        torch._foreach_add_(
            self._weights, [part.view_as(weight) for part, weight in zip(parts, self._weights, strict=True)]
        )

    def remove(self) -> None:
        torch._foreach_copy_(self._weights, self._saved)


def _fit(
    pipeline: FluxPipeline,
    training: Training,
    batch: Callable[[], Batch],
    disturbance: _RoundingNoise | None,
    device: torch.device,
) -> dict[str, float]:
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    for module in modules:
        module.to(device).train()
    parameters = [p for module in modules for p in module.parameters()]
    average = [p.detach().clone() for p in parameters]
    optimizer = Optimizer(parameters, training)
    smoothed = torch.zeros((), device=device)
    for number in range(training.steps):
        now = batch()
        x_t = torch.lerp(now.x0, now.noise, now.t[:, None, None])
        if disturbance is not None:
            disturbance.add()
        with bfloat16(device):
            velocity = _velocity(pipeline, x_t, now.t, *_encode_captions(pipeline, now.captions))
        loss = (velocity - (now.noise - now.x0)).square().mean()
        loss.backward()
        if disturbance is not None:
            disturbance.remove()
        optimizer.step()
        with torch.no_grad():
            decay = min(training.averaging, (1 + number) / (10 + number))
            torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
            smoothed.lerp_(loss.detach(), 1.0 if number == 0 else 0.01)
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)
    for module in modules:
        module.eval()
    return {"loss": smoothed.item(), "steps": training.steps}


def _encode_captions(pipeline: FluxPipeline, scenes: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `FluxPipeline.encode_prompt` for the captions: [B, 16, width] and [B, width]."""
    sequence = pipeline.text_encoder_2(token_ids(pipeline.tokenizer_2, scenes))[0]
    return sequence, pipeline.text_encoder(token_ids(pipeline.tokenizer, scenes)).pooler_output


def _velocity(pipeline: FluxPipeline, x_t: Tensor, t: Tensor, sequence: Tensor, pooled: Tensor) -> Tensor:
    side = RESOLUTION // (2 * pipeline.vae_scale_factor)
    velocity = pipeline.transformer(
        hidden_states=x_t,
        encoder_hidden_states=sequence,
        pooled_projections=pooled,
        timestep=t,
        img_ids=pipeline._prepare_latent_image_ids(1, side, side, x_t.device, torch.float32),
        txt_ids=torch.zeros(sequence.shape[1], 3, device=x_t.device),
        guidance=torch.ones_like(t),
        return_dict=False,
    )[0]
    return velocity.float()


@torch.no_grad()
def _sample(pipeline: FluxPipeline, scenes: Tensor, noise: Tensor, device: torch.device) -> Tensor:
    grid = schedules.sigmas(SCHEDULE, PAIR_STEPS, IMAGE_TOKENS)
    latents = []
    for chunk, start in zip(scenes.split(8192), noise.split(8192), strict=True):
        with bfloat16(device):
            sequence, pooled = _encode_captions(pipeline, chunk)

        def velocity(x: Tensor, sigma: float, sequence: Tensor = sequence, pooled: Tensor = pooled) -> Tensor:
            with bfloat16(device):
                return _velocity(pipeline, x, x.new_full((len(x),), sigma), sequence, pooled)

        latents.append(solvers.advance(velocity, solvers.SolverState(start), grid, "euler").latents)
    return torch.cat(latents)


@torch.no_grad()
def _encode(pipeline: FluxPipeline, scenes: Tensor, generator: torch.Generator) -> Tensor:
    """Packed, normalised latents [B, 64, 16] of one picture per scene, as FluxPipeline's decoding expects."""
    vae = pipeline.vae.to(scenes.device)
    packed = []
    for chunk in scenes.split(4096):
        latent = vae.encode(draw_pictures(chunk, generator) * 2 - 1).latent_dist.mean
        latent = (latent - vae.config.shift_factor) * vae.config.scaling_factor
        packed.append(pipeline._pack_latents(latent, len(chunk), *latent.shape[1:]))
    return torch.cat(packed)


def _logit_normal(count: int, generator: torch.Generator) -> Tensor:
    """Timesteps around the grid's shift (mu at 64 image tokens is 0.4675), a tenth of them uniform."""
    device = generator.device
    normal = torch.sigmoid(0.4675 + torch.randn(count, device=device, generator=generator))
    uniform, choice = torch.rand(2, count, device=device, generator=generator)
    return torch.where(choice < 0.1, uniform, normal)
