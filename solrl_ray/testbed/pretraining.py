"""Trains the testbed's three networks on the procedural world: autoencoder, reward, diffusion transformer.

Deliberately imperfect: the captions of the diffusion transformer have words replaced at random, so that it
draws recognisable scenes that often differ from the prompt. That leaves room for reinforcement learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch.nn import functional
from transformers import CLIPModel

from solrl_ray.testbed.captions import TokenTable, corrupt, draw, meaning, neighbours
from solrl_ray.testbed.world import JITTERS, render


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Steps, batch size, peak learning rate and seed of one network's training."""

    steps: int
    batch: int
    lr: float
    seed: int


def train_autoencoder(vae: AutoencoderKL, training: Training, device: torch.device) -> dict[str, float]:
    """Trains `vae` in place and sets its shift and scaling so that latents have mean 0 and std 1."""
    generator = torch.Generator(device).manual_seed(training.seed)
    vae.to(device).train()
    for step in _steps(list(vae.parameters()), training):
        pictures = _pictures(draw(training.batch, generator), generator) * 2 - 1
        with _bfloat16(device):
            posterior = vae.encode(pictures).latent_dist
            # The decoder also learns from latents that are a little off: a sampler's are, too.
            noise = torch.randn(posterior.mean.shape, device=device, generator=generator)
            restored = vae.decode(posterior.mean + posterior.std * noise).sample.float()
        error = restored - pictures
        loss = error.abs().mean() + error.square().mean() + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()
        step(loss)
    vae.eval()
    with torch.no_grad():
        pictures = _pictures(draw(2048, generator), generator) * 2 - 1
        posterior = vae.encode(pictures).latent_dist
        mean, std = posterior.mean.mean().item(), posterior.mean.std().item()
        restored = vae.decode(posterior.mean).sample.clamp(-1, 1)
    vae.register_to_config(shift_factor=mean, scaling_factor=1.0 / std)
    error = ((restored - pictures) / 2).square().mean().item()
    return {
        "psnr_db": -10 * math.log10(error),
        "latent_mean": mean,
        "latent_std": std,
        "posterior_noise": posterior.std.mean().item() / std,
    }


def train_reward(
    model: CLIPModel, training: Training, heldout: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """Trains `model` in place with in-batch contrast; every scene comes with a near miss.

    Scenes that mean one of `heldout` (int64 [B], see `captions.meaning`) are never shown.
    """
    generator = torch.Generator(device).manual_seed(training.seed)
    table = TokenTable(device)
    model.to(device).train()
    heldout = heldout.to(device)
    with torch.no_grad():
        # A fixed, moderate temperature: near misses must differ in cosine, not only in a large logit.
        model.logit_scale.fill_(math.log(16.0))
    parameters = [p for name, p in model.named_parameters() if name != "logit_scale"]
    for step in _steps(parameters, training):
        scenes = _without(draw(training.batch, generator), heldout)
        scenes = torch.cat([scenes, _without(neighbours(scenes, generator), heldout)])
        pictures = _pictures(scenes, generator)
        half = len(scenes) // 2
        weight = 0.3 + 0.4 * torch.rand(half, 1, 1, 1, device=device, generator=generator)
        # Double exposures match no caption: a picture that hedges between two scenes earns little.
        doubles = torch.lerp(pictures[:half], pictures[-half:].flip(0), weight)
        with _bfloat16(device):
            images = image_features(model, _weathered(torch.cat([pictures, doubles]), generator))
            texts = text_features(model, table.clip(scenes))
        logits = 16.0 * texts.float() @ images.float().T
        codes = meaning(scenes)
        same = codes[:, None] == codes[None, :]
        same.fill_diagonal_(False)
        logits[:, : len(scenes)].masked_fill_(same, -1e4)
        target = torch.arange(len(scenes), device=device)
        step(functional.cross_entropy(logits, target) + functional.cross_entropy(logits[:, : len(scenes)].T, target))
    model.eval()
    return _judge_reward(model, table, generator)


def train_transformer(
    pipeline: FluxPipeline,
    training: Training,
    *,
    pictures: int,
    corruption: float,
    heldout: torch.Tensor,
    device: torch.device,
) -> dict[str, float]:
    """Trains transformer and text encoders of `pipeline` in place by flow matching on its autoencoder's latents.

    x_t = (1 - t) x0 + t noise, target velocity noise - x0, timestep t in [0, 1], guidance input 1: what
    FluxPipeline feeds. Weights are an exponential moving average. It sees `pictures` different pictures, and
    each of their words replaced with probability `corruption`; never a scene of `heldout`.
    """
    generator = torch.Generator(device).manual_seed(training.seed)
    table = TokenTable(device)
    latents, scenes = _latents(pipeline, _without(draw(pictures, generator), heldout.to(device)), generator)
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    for module in modules:
        module.to(device).train()
    parameters = [p for module in modules for p in module.parameters()]
    average = [p.detach().clone() for p in parameters]
    grid = pipeline._prepare_latent_image_ids(1, 8, 8, device, torch.float32)
    losses = torch.zeros((), device=device)
    for number, step in enumerate(_steps(parameters, training)):
        rows = torch.randint(len(latents), (training.batch,), device=device, generator=generator)
        x0, captions = latents[rows], corrupt(scenes[rows], corruption, generator)
        noise = torch.randn(x0.shape, device=device, generator=generator)
        t = _timesteps(training.batch, generator)
        x_t = torch.lerp(x0, noise, t[:, None, None])
        with _bfloat16(device):
            text = pipeline.text_encoder_2(table.t5(captions))[0]
            velocity = pipeline.transformer(
                hidden_states=x_t,
                encoder_hidden_states=text,
                pooled_projections=pipeline.text_encoder(table.clip(captions)).pooler_output,
                timestep=t,
                img_ids=grid,
                txt_ids=torch.zeros(text.shape[1], 3, device=device),
                guidance=torch.ones_like(t),
                return_dict=False,
            )[0]
        loss = (velocity.float() - (noise - x0)).square().mean()
        step(loss)
        decay = min(0.9995, (1 + number) / (10 + number))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        losses = torch.lerp(losses, loss.detach(), 1.0 if number == 0 else 0.01)
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)
    for module in modules:
        module.eval()
    return {"loss": losses.item(), "corruption": corruption}


def image_features(model: CLIPModel, pictures: torch.Tensor) -> torch.Tensor:
    """Unit-length image features [B, 64] of pictures in [0, 1]."""
    hidden = model.vision_model(pixel_values=pictures * 2 - 1).pooler_output
    return functional.normalize(model.visual_projection(hidden).float(), dim=-1)


def text_features(model: CLIPModel, ids: torch.Tensor) -> torch.Tensor:
    """Unit-length text features [B, 64] of token ids [B, CLIP_TOKENS]."""
    hidden = model.text_model(input_ids=ids).pooler_output
    return functional.normalize(model.text_projection(hidden).float(), dim=-1)


def _judge_reward(model: CLIPModel, table: TokenTable, generator: torch.Generator) -> dict[str, float]:
    """Cosine of real pictures, of near misses, of unrelated pictures; and how often the right one wins."""
    scenes = draw(2048, generator)
    with torch.no_grad():
        texts = text_features(model, table.clip(scenes))
        right = (texts * image_features(model, _pictures(scenes, generator))).sum(1)
        near = (texts * image_features(model, _pictures(neighbours(scenes, generator), generator))).sum(1)
        far = (texts * image_features(model, _pictures(draw(2048, generator), generator))).sum(1)
    return {
        "cosine_right": right.mean().item(),
        "cosine_near_miss": near.mean().item(),
        "cosine_unrelated": far.mean().item(),
        "near_miss_accuracy": (right > near).float().mean().item(),
    }


def _steps(parameters: list[torch.nn.Parameter], training: Training) -> Iterator:
    """Yields once a step a function that takes the loss and does backward, clipping and AdamW.

    Learning rate: 200 steps of warm-up, then a cosine to zero.
    """
    optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=0.01, betas=(0.9, 0.99))

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    for number in range(training.steps):
        rate = min(1.0, (number + 1) / 200) * 0.5 * (1 + math.cos(math.pi * number / training.steps))
        for group in optimizer.param_groups:
            group["lr"] = training.lr * rate
        yield step


def _pictures(scenes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return render(scenes, torch.rand(len(scenes), JITTERS, device=scenes.device, generator=generator))


def _without(scenes: torch.Tensor, heldout: torch.Tensor) -> torch.Tensor:
    """`scenes` with those that mean a held-out one replaced by their predecessors."""
    hidden = torch.isin(meaning(scenes), heldout)
    while hidden.any():
        scenes = torch.where(hidden[:, None], scenes.roll(1, 0), scenes)
        hidden = torch.isin(meaning(scenes), heldout)
    return scenes


def _weathered(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Light noise, blur and change of brightness, so that the reward looks at content, not at pixels."""
    size, device = len(pictures), pictures.device
    blurred = functional.avg_pool2d(functional.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    amount = torch.rand(size, 3, 1, 1, 1, device=device, generator=generator)
    pictures = torch.lerp(pictures, blurred, (2 * amount[:, 0] - 1).clamp(min=0))
    noise = torch.randn(pictures.shape, device=device, generator=generator)
    brightness = 1 + 0.2 * (amount[:, 2] - 0.5)
    return (pictures * brightness + 0.06 * amount[:, 1] * noise).clamp(0, 1)


def _timesteps(count: int, generator: torch.Generator) -> torch.Tensor:
    """Logit-normal around the grid's shift (mu at 64 image tokens is 0.4675), with a tenth uniform."""
    device = generator.device
    normal = torch.sigmoid(0.4675 + torch.randn(count, device=device, generator=generator))
    uniform, choice = torch.rand(2, count, device=device, generator=generator)
    return torch.where(choice < 0.1, uniform, normal)


@torch.no_grad()
def _latents(
    pipeline: FluxPipeline, scenes: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed, normalised latents [B, 64, 16] of one picture per scene, as FluxPipeline's decoding expects."""
    vae = pipeline.vae
    packed = []
    for chunk in scenes.split(4096):
        latent = vae.encode(_pictures(chunk, generator) * 2 - 1).latent_dist.mean
        latent = (latent - vae.config.shift_factor) * vae.config.scaling_factor
        packed.append(pipeline._pack_latents(latent, len(chunk), *latent.shape[1:]))
    return torch.cat(packed), scenes


def _bfloat16(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16)
