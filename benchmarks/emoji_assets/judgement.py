"""Is a model's picture recognised? By a CLIP, and on pages for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from emoji_assets.captions import Parts
from emoji_assets.objectives import decode, sample
from emoji_assets.pictures import token_ids
from PIL import Image, ImageDraw
from testbed_assets.networks import image_features, text_features
from torch import Tensor
from torch.nn import functional

STEPS = 10
CHUNK = 256


@torch.no_grad()
def generate(
    pipe: FluxPipeline, prompts: Sequence[str], device: torch.device, *, seed: int, steps: int = STEPS
) -> Tensor:
    """One picture a prompt, float32 [B, 3, H, W] in [0, 1], on the CPU."""
    config = pipe.vae.config
    side = config.sample_size // (2 * pipe.vae_scale_factor)
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for start in range(0, len(prompts), CHUNK):
        texts = prompts[start : start + CHUNK]
        noise = torch.randn(len(texts), side * side, 4 * config.latent_channels, device=device, generator=generator)
        clip, t5 = (token_ids(each, texts, device) for each in (pipe.tokenizer, pipe.tokenizer_2))
        made.append(decode(pipe, sample(pipe, clip, t5, noise, steps=steps)).cpu())
    return torch.cat(made)


@torch.no_grad()
def scores(model: Any, tokenizer: Any, pictures: Tensor, texts: Sequence[str], device: torch.device) -> Tensor:
    """The cosine of each picture, float32 [P, 3, H, W] in [0, 1], with each text: float32 [P, T], on the CPU."""
    images = torch.cat([image_features(model, chunk.to(device)) for chunk in pictures.split(CHUNK)])
    said = torch.cat(
        [text_features(model, token_ids(tokenizer, texts[i : i + CHUNK], device)) for i in range(0, len(texts), CHUNK)]
    )
    return (functional.normalize(images, dim=-1) @ functional.normalize(said, dim=-1).T).float().cpu()


def recognised(
    model: Any, tokenizer: Any, pictures: Tensor, shown: Sequence[Parts], device: torch.device
) -> dict[str, float]:
    """How a CLIP sees pictures of what `shown` says: the cosine with their prompts, and the shares for which the name
    is the best, or among the best five, of the names of all concepts that are shown.
    """
    names = sorted({each.name for each in shown})
    own = torch.tensor([names.index(each.name) for each in shown])
    of_names = scores(model, tokenizer, pictures, names, device)
    rank = (of_names > of_names.gather(1, own[:, None])).sum(dim=1)
    of_prompts = scores(model, tokenizer, pictures, [each.prompt for each in shown], device)
    return {
        "cosine": of_prompts.diagonal().mean().item(),
        "first": (rank == 0).float().mean().item(),
        "first_five": (rank < 5).float().mean().item(),
        "of": len(names),
    }


def mean_cosine(
    model: Any, tokenizer: Any, pictures: Sequence[Tensor], texts: Sequence[str], device: torch.device
) -> float:
    """Over texts, of the mean cosine of each with its pictures, float32 [n, 3, H, W] in [0, 1]."""
    own = torch.cat([torch.full((len(each),), place) for place, each in enumerate(pictures)])
    cosines = scores(model, tokenizer, torch.cat(list(pictures)), texts, device).gather(1, own[:, None])[:, 0]
    return torch.stack([cosines[own == place].mean() for place in range(len(texts))]).mean().item()


def mean_look(
    model: Any,
    tokenizer: Any,
    pictures: Sequence[Tensor],
    subjects: Sequence[str],
    style: str,
    styles: Sequence[str],
    device: torch.device,
) -> float:
    """Over subjects, of the mean look of each one's pictures, float32 [n, 3, H, W] in [0, 1]: the cosine with the
    subject in the style, and how far it is above the mean of those in the other styles.
    """
    cosines = {
        each: mean_cosine(model, tokenizer, pictures, [f"{subject}, {each} style" for subject in subjects], device)
        for each in styles
    }
    own = cosines.pop(style)
    return own + (own - sum(cosines.values()) / len(cosines))


def page(rows: Sequence[tuple[str, Tensor]], file: Path, scale: int = 1) -> None:
    """Rows of pictures, float [n, 3, H, W] in [0, 1], each under its text; written as PNG."""
    height, width = rows[0][1].shape[2:]
    height, width, line = height * scale, width * scale, 14
    columns = max(len(pictures) for _, pictures in rows)
    sheet = Image.new("RGB", (columns * width, len(rows) * (height + line)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (text, pictures) in enumerate(rows):
        top = number * (height + line)
        pen.text((3, top + 1), text, fill="black")
        for column, picture in enumerate(pictures):
            values = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
            tile = Image.fromarray(np.ascontiguousarray(values)).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(tile, (column * width, top + line))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file, optimize=True)
