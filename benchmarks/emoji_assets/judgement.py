"""Measures whether CLIPs recognise a model's images, and writes sheets of images for people to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from emoji_assets.captions import Parts
from emoji_assets.drawings import STYLES
from emoji_assets.objectives import decode, image_features, sample, text_features
from emoji_assets.pictures import token_ids
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

STEPS = 10
CHUNK = 256
SHOWN = 256
"""Number of images of each kind that are scored."""
EVALUATED = 96
"""Number of held-out prompts in a run's evaluation."""
SAMPLES = 4
"""Images per prompt."""
STYLE = "blob"
"""The style that the example trains."""


@torch.no_grad()
def generate(
    pipe: FluxPipeline, prompts: Sequence[str], device: torch.device, *, seed: int, steps: int = STEPS
) -> Tensor:
    """One image per prompt: float32 [B, 3, H, W] in [0, 1], on the CPU."""
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
    """Cosine of each image, float32 [P, 3, H, W] in [0, 1], with each text: float32 [P, T], on the CPU."""
    images = torch.cat([image_features(model, chunk.to(device)) for chunk in pictures.split(CHUNK)])
    described = torch.cat(
        [text_features(model, token_ids(tokenizer, texts[i : i + CHUNK], device)) for i in range(0, len(texts), CHUNK)]
    )
    return (functional.normalize(images, dim=-1) @ functional.normalize(described, dim=-1).T).float().cpu()


def recognised(
    model: Any, tokenizer: Any, pictures: Tensor, shown: Sequence[Parts], device: torch.device
) -> dict[str, float]:
    """A CLIP's recognition of images generated for `shown`: the mean cosine with their prompts, and the shares of
    images whose name ranks first, or among the first five, of the names of all shown concepts.
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
    """Mean over texts of each text's mean cosine with its images, float32 [n, 3, H, W] in [0, 1]."""
    own = torch.cat([torch.full((len(each),), place) for place, each in enumerate(pictures)])
    cosines = scores(model, tokenizer, torch.cat(list(pictures)), texts, device).gather(1, own[:, None])[:, 0]
    return torch.stack([cosines[own == place].mean() for place in range(len(texts))]).mean().item()


def page(rows: Sequence[tuple[str, Tensor]], file: Path, scale: int = 1) -> None:
    """Write a PNG with rows of images, float [n, 3, H, W] in [0, 1], each row under its text."""
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


def psnr(restored: Tensor, real: Tensor) -> float:
    """PSNR of images in [0, 1], in dB."""
    return (-10 * (restored - real).square().mean().clamp(min=1e-9).log10()).item()


@dataclass(frozen=True, slots=True)
class Judgement:
    """Scores real, restored and generated images with CLIPs. Images are float32 [n, 3, H, W] in [0, 1]."""

    pipe: FluxPipeline | None
    """None if the model is not trained yet."""
    clips: Mapping[str, Any]
    tokenizer: Any
    parts: Sequence[Parts]
    pixels: np.ndarray
    """The images of `parts`: uint8 [N, H, W, 3]."""
    restore: Callable[[Tensor], Tensor]
    """Function that passes images through the autoencoder."""
    device: torch.device

    def of_concepts(self, folder: Path) -> dict[str, Any]:
        """Recognition of images of known and of held-out concepts; also writes sheets with some of the images."""
        found: dict[str, Any] = {}
        generator = np.random.default_rng(4)
        for kind, held_out in (("known", False), ("held_out", True)):
            rows = [row for row, each in enumerate(self.parts) if each.held_out == held_out]
            rows = sorted(generator.permutation(rows)[:SHOWN].tolist())
            shown = [self.parts[row] for row in rows]
            real = self._real(rows)
            made = {"real": real, "restored": self.restore(real)}
            if self.pipe is not None:
                made["model"] = generate(self.pipe, [each.prompt for each in shown], self.device, seed=6)
            for name, seen in made.items():
                found[f"{kind}_{name}"] = {
                    clip: recognised(model.eval(), self.tokenizer, seen, shown, self.device)
                    for clip, model in self.clips.items()
                }
            found[f"{kind}_restored"]["psnr_db"] = psnr(made["restored"], real)
            self._page(folder / f"{kind}.png", shown, made)
        return found

    def of_prompts(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Mean scores of reward and judge for the first prompts, of known concepts: cosines, and the style's reward."""
        texts = prompts[:EVALUATED]
        known = [row for row, each in enumerate(self.parts) if not each.held_out]
        rows = [[row for row in known if self.parts[row].shows(text)] for text in texts]
        subjects = [self.parts[of[0]].subject for of in rows]
        seen = {"real": [self._real(of) for of in rows]}
        if self.pipe is not None:
            made = [generate(self.pipe, texts, self.device, seed=seed) for seed in range(30, 30 + SAMPLES)]
            seen["model"] = list(torch.stack(made, dim=1))
        drawn: dict[str, list[int]] = {each.subject: [] for each in self.parts}
        for row in known:
            if self.parts[row].style == STYLE:
                drawn[self.parts[row].subject].append(row)
        both = [place for place, each in enumerate(subjects) if drawn[each]]
        looks = {"real": [self._real(drawn[subjects[place]]) for place in both]}
        if "model" in seen:
            looks["model"] = [seen["model"][place] for place in both]
        named = [subjects[place] for place in both]
        return {name: self._cosines(shown, texts) for name, shown in seen.items()} | {
            "look": {name: self._look(shown, named) for name, shown in looks.items() if shown}
        }

    def _cosines(self, shown: Sequence[Tensor], texts: Sequence[str]) -> dict[str, float]:
        """CLIP → mean cosine of texts and their images."""
        return {
            clip: mean_cosine(model.eval(), self.tokenizer, shown, texts, self.device)
            for clip, model in self.clips.items()
        }

    def _look(self, shown: Sequence[Tensor], subjects: Sequence[str]) -> dict[str, float]:
        """CLIP → mean reward of the style: cosine with the subject in the style, plus the margin over other styles."""
        of = {style: self._cosines(shown, [f"{subject}, {style} style" for subject in subjects]) for style in STYLES}
        own = of.pop(STYLE)
        return {clip: 2 * own[clip] - sum(other[clip] for other in of.values()) / len(of) for clip in own}

    def _real(self, rows: Sequence[int]) -> Tensor:
        """The real images of `rows`."""
        return torch.from_numpy(self.pixels[list(rows)]).permute(0, 3, 1, 2).float() / 255

    def _page(self, file: Path, shown: list[Parts], made: dict[str, Tensor]) -> None:
        """Write a sheet: for some prompts the real image, the restored one, and images of the model."""
        some = list(range(0, len(shown), max(1, len(shown) // 32)))[:32]
        seeds = [] if self.pipe is None else range(20, 24)
        more = [generate(self.pipe, [shown[i].prompt for i in some], self.device, seed=s) for s in seeds]
        rows = []
        for place, index in enumerate(some):
            row = [made["real"][index], made["restored"][index], *(each[place] for each in more)]
            rows.append((shown[index].prompt, torch.stack(row)))
        page(rows, file)
