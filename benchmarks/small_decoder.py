"""A small decoder for the testbed's latents, distilled from its VAE: what TAESD is to a published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.testbed.captions import draw
from solrl_ray.testbed.pretraining import draw_pictures

STEPS, BATCH, LEARNING_RATE = 1500, 16, 2e-3


def distil(config: Model, channels: int, folder: Path) -> str:
    """Writes an `AutoencoderTiny` of that width into `folder`: a minute on a CPU.

    It learns what the VAE makes of the latents of the world's own pictures. Returns in words how large it is, and the
    root mean square difference of their pixels at the end, of values in [-1, 1].
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    vae: Any = models.load(config, "cpu", components={"vae"}).decoder
    width = (channels, channels)
    small = AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=vae.config.latent_channels,
    )
    optimizer = torch.optim.Adam(small.decoder.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loss = torch.tensor(0.0)
    for _ in range(STEPS):
        with torch.no_grad():
            latents = vae.encode(draw_pictures(draw(BATCH, generator), generator) * 2 - 1).latent_dist.mean
            wanted = vae.decode(latents).sample
        scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        loss = F.mse_loss(small.decode(scaled).sample, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    small.save_pretrained(folder)
    weights, of = (sum(p.numel() for p in model.decoder.parameters()) for model in (small, vae))
    return f"{weights:,} weights, the VAE's decoder has {of:,}; pixels differ by {float(loss.detach().sqrt()):.3f}"
