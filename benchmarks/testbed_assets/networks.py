"""The testbed's networks, untrained, with the shipped settings and tokenizers; training of autoencoder and reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxPipeline
from testbed_assets.captions import draw, meaning, neighbours, token_ids
from torch import nn
from torch.nn import functional
from transformers import CLIPModel, CLIPProcessor, PreTrainedModel

from solrl_ray.testbed import world
from solrl_ray.testbed.world import JITTERS, render

ASSETS = Path(world.__file__).parent / "assets"


def flux_pipeline(seed: int) -> FluxPipeline:
    """An untrained pipeline in float32, evaluation mode, on the CPU; its weights depend on `seed` alone."""
    shipped = FluxPipeline.from_pretrained(ASSETS / "pipeline", torch_dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = {name: _untrained(part) for name, part in shipped.components.items() if isinstance(part, nn.Module)}
    fresh["vae"].register_to_config(shift_factor=0.0, scaling_factor=1.0)  # computed when it is trained
    return FluxPipeline(**shipped.components | fresh)


def reward_model(seed: int) -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained CLIP for 32 × 32 pictures and its processor; float32, evaluation mode, on the CPU."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _untrained(CLIPModel.from_pretrained(ASSETS / "reward"))
    return model, CLIPProcessor.from_pretrained(ASSETS / "reward")


def _untrained(trained: Any) -> Any:
    """A network of the same class and settings."""
    kind, config = type(trained), trained.config
    if isinstance(trained, PreTrainedModel):
        return kind(config).float().eval()
    settings = {key: value for key, value in config.items() if key != "_name_or_path"}
    return kind.from_config(settings).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How one network is trained."""

    steps: int
    batch: int
    lr: float
    """Peak learning rate."""
    seed: int
    averaging: float = 0.0
    """Decay of the exponential moving average of the weights; 0 keeps the last weights."""


def train_autoencoder(vae: AutoencoderKL, training: Training, device: torch.device) -> dict[str, float]:
    """Trains `vae` in place and sets its shift and scaling so that latents have mean 0 and std 1."""
    generator = torch.Generator(device).manual_seed(training.seed)
    vae.to(device).train()
    optimizer = Optimizer(list(vae.parameters()), training)
    for _ in range(training.steps):
        pictures = draw_pictures(draw(training.batch, generator), generator) * 2 - 1
        with bfloat16(device):
            posterior = vae.encode(pictures).latent_dist
            # The decoder also learns from latents that are slightly wrong, like a sampler's.
            noise = torch.randn(posterior.mean.shape, device=device, generator=generator)
            restored = vae.decode(posterior.mean + posterior.std * noise).sample.float()
        error = restored - pictures
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        (error.abs().mean() + error.square().mean() + 1e-3 * divergence).backward()
        optimizer.step()
    vae.eval()
    with torch.no_grad():
        pictures = draw_pictures(draw(2048, generator), generator) * 2 - 1
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
    model: CLIPModel, tokenizer: Any, training: Training, heldout: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """Trains `model` in place with in-batch contrast; every scene comes with a near miss.

    Scenes that mean one of `heldout` (int64 [B], see `captions.meaning`) are never shown.
    """
    generator = torch.Generator(device).manual_seed(training.seed)
    model.to(device).train()
    heldout = heldout.to(device)
    with torch.no_grad():
        # A fixed, moderate temperature: near misses must differ in cosine, not only in a large logit.
        model.logit_scale.fill_(math.log(16.0))
    parameters = [p for name, p in model.named_parameters() if name != "logit_scale"]
    optimizer = Optimizer(parameters, training)
    for _ in range(training.steps):
        scenes = without_meanings(draw(training.batch, generator), heldout)
        scenes = torch.cat([scenes, without_meanings(neighbours(scenes, generator), heldout)])
        pictures = draw_pictures(scenes, generator)
        half = len(scenes) // 2
        weight = 0.3 + 0.4 * torch.rand(half, 1, 1, 1, device=device, generator=generator)
        # Double exposures match no caption, so a picture between two scenes earns little.
        doubles = torch.lerp(pictures[:half], pictures[-half:].flip(0), weight)
        with bfloat16(device):
            images = image_features(model, weathered(torch.cat([pictures, doubles]), generator))
            texts = text_features(model, token_ids(tokenizer, scenes))
        logits = 16.0 * texts @ images.T
        codes = meaning(scenes)
        same = codes[:, None] == codes[None, :]
        same.fill_diagonal_(False)
        logits[:, : len(scenes)].masked_fill_(same, -1e4)
        target = torch.arange(len(scenes), device=device)
        by_text = functional.cross_entropy(logits, target)
        by_image = functional.cross_entropy(logits[:, : len(scenes)].T, target)
        (by_text + by_image).backward()
        optimizer.step()
    model.eval()
    return _judge_reward(model, tokenizer, generator)


def image_features(model: CLIPModel, pictures: torch.Tensor) -> torch.Tensor:
    """Unit-length image features [B, 64] of pictures in [0, 1]."""
    return functional.normalize(model.get_image_features(pixel_values=pictures * 2 - 1).pooler_output.float(), dim=-1)


def text_features(model: CLIPModel, ids: torch.Tensor) -> torch.Tensor:
    """Unit-length text features [B, 64] of token ids [B, 16]."""
    return functional.normalize(model.get_text_features(input_ids=ids).pooler_output.float(), dim=-1)


def _judge_reward(model: CLIPModel, tokenizer: Any, generator: torch.Generator) -> dict[str, float]:
    """Cosine of real pictures, of near misses, of unrelated pictures; and how often the right one wins."""
    scenes = draw(2048, generator)
    with torch.no_grad():
        texts = text_features(model, token_ids(tokenizer, scenes))
        right = (texts * image_features(model, draw_pictures(scenes, generator))).sum(1)
        near = (texts * image_features(model, draw_pictures(neighbours(scenes, generator), generator))).sum(1)
        far = (texts * image_features(model, draw_pictures(draw(2048, generator), generator))).sum(1)
    return {
        "cosine_right": right.mean().item(),
        "cosine_near_miss": near.mean().item(),
        "cosine_unrelated": far.mean().item(),
        "near_miss_accuracy": (right > near).float().mean().item(),
    }


class Optimizer:
    """AdamW with clipped gradients; its rate warms up for 200 steps, then falls as a cosine to zero."""

    def __init__(self, parameters: list[torch.nn.Parameter], training: Training) -> None:
        self._parameters, self._training, self._number = parameters, training, 0
        self._adamw = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=0.01, betas=(0.9, 0.99))

    def step(self) -> None:
        """Takes one step with the gradients at hand, then clears them."""
        progress = self._number / self._training.steps
        rate = min(1.0, (self._number + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self._adamw.param_groups:
            group["lr"] = self._training.lr * rate
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._number += 1


def draw_pictures(scenes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One picture per scene, its free numbers drawn: float32 [B, 3, 32, 32] in [0, 1]."""
    return render(scenes, torch.rand(len(scenes), JITTERS, device=scenes.device, generator=generator))


def without_meanings(scenes: torch.Tensor, heldout: torch.Tensor) -> torch.Tensor:
    """`scenes` with those that mean a held-out one replaced by their predecessors."""
    hidden = torch.isin(meaning(scenes), heldout)
    while hidden.any():
        scenes = torch.where(hidden[:, None], scenes.roll(1, 0), scenes)
        hidden = torch.isin(meaning(scenes), heldout)
    return scenes


def weathered(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Slight noise, blur and change of brightness, so that the reward depends on content, not on pixels."""
    size, device = len(pictures), pictures.device
    blurred = functional.avg_pool2d(functional.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    amount = torch.rand(size, 3, 1, 1, 1, device=device, generator=generator)
    pictures = torch.lerp(pictures, blurred, (2 * amount[:, 0] - 1).clamp(min=0))
    noise = torch.randn(pictures.shape, device=device, generator=generator)
    brightness = 1 + 0.2 * (amount[:, 2] - 0.5)
    return (pictures * brightness + 0.06 * amount[:, 1] * noise).clamp(0, 1)


def bfloat16(device: torch.device) -> torch.autocast:
    """Matrix products in BF16, weights in float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16)
