"""How many images a second does each reward score, beside the way in which its original scores them?

Ours: the whole batch on the device, each prompt's text once. The originals' way, as in their packages and the scripts
that use them: every image through Pillow on the CPU and through the network alone, its text again each time;
ImageReward all images with all prompts (`inference_rank`), of which the diagonal is kept. Not counted against them:
hpsv2's `score` loads its checkpoint anew at every call. Networks have the published sizes and random weights, which
cost the same time; both ways share them, and their scores are compared. Aim: 5 times on a GPU.

    python benchmarks/reward_throughput.py [--device cuda] [--batch 24] [--repeats 5] [--rewards pickscore hpsv2]

Prints a table; writes benchmarks/results/reward_throughput.json and .png.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import open_clip
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor
from torchvision.transforms import functional as tv
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionModelWithProjection,
)

from solrl_ray.quantization.attestation import device_name
from solrl_ray.rewards.aesthetic import Aesthetic
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.clip import SCALE, CLIPScore, PickScore
from solrl_ray.rewards.heads import ScoreHead
from solrl_ray.rewards.hpsv2 import HPSv2
from solrl_ray.rewards.imagereward import MAX_TOKENS, MEAN, STD, ImageReward
from solrl_ray.rewards.preprocessing import CLIP_MEAN, CLIP_STD, Preprocessing

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
RESOLUTION = 512
AIM = 5.0
Original = Callable[[list[Image.Image], list[str]], Tensor]
TOWERS: dict[str, dict[str, Any]] = {
    "L": {"vision": (1024, 24, 16, 4096), "text": (768, 12, 12, 3072), "projection": 768, "act": "quick_gelu"},
    "H": {"vision": (1280, 32, 16, 5120), "text": (1024, 24, 16, 4096), "projection": 1024, "act": "gelu"},
}
"""hidden size, layers, heads and MLP width of the published CLIP checkpoints; patches of 14 pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    reward: str
    batch: int
    ours: float
    """Images a second, fastest repetition."""
    original: float
    largest_difference: float
    """Between the scores of the two ways."""

    @property
    def ratio(self) -> float:
        return self.ours / self.original


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rewards", nargs="+", choices=sorted(MAKERS), default=sorted(MAKERS))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    measured = []
    print(f"{device_name(device)}, batch {arguments.batch}, {RESOLUTION} px, float32")
    for name in arguments.rewards:
        with torch.no_grad():
            result = measure(name, device, arguments.batch, arguments.repeats)
        measured.append(result)
        print(
            f"{name:<12} ours {result.ours:9.1f} images/s   original {result.original:8.1f} images/s   "
            f"{result.ratio:6.1f} x   scores differ by at most {result.largest_difference:.1e}",
            flush=True,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(measured, device)


def measure(name: str, device: torch.device, batch: int, repeats: int) -> Measured:
    torch.manual_seed(0)
    with device:  # random weights are drawn where they are used: a billion of them take long on a CPU
        reward, original = MAKERS[name](device)
    noise = torch.rand(batch, 3, 16, 16, device=device)
    images = nn.functional.interpolate(noise, (RESOLUTION, RESOLUTION), mode="bicubic").clamp(0, 1)
    prompts = [f"a photo of {i} red squares on a blue table" for i in range(batch)]

    def published() -> Tensor:
        arrays = (images.permute(0, 2, 3, 1).cpu().numpy() * 255).round().astype(np.uint8)
        return original([Image.fromarray(array) for array in arrays], prompts)

    ours, scores = fastest(lambda: reward.score(images, prompts), repeats, device)
    theirs, expected = fastest(published, max(repeats // 3, 1), device)
    return Measured(
        reward=name,
        batch=batch,
        ours=batch / ours,
        original=batch / theirs,
        largest_difference=(scores - expected).abs().max().item(),
    )


def fastest(function: Callable[[], Tensor], repeats: int, device: torch.device) -> tuple[float, Tensor]:
    """Seconds of the fastest repetition, after one that warms up, and its scores on the CPU."""
    best = float("inf")
    for repetition in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        scores = function().cpu()
        if repetition:
            best = min(best, time.perf_counter() - started)
    return best, scores


# --- the rewards, and the originals' way with the same networks


def clip_config(size: str) -> CLIPConfig:
    towers = TOWERS[size]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    common = {"hidden_act": towers["act"], "projection_dim": towers["projection"]}
    vision = dict(zip(names, towers["vision"], strict=True)) | common | {"patch_size": 14, "image_size": 224}
    text = dict(zip(names, towers["text"], strict=True)) | common | {"eos_token_id": 49407, "bos_token_id": 49406}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=towers["projection"])


def clip_tokenizer() -> CLIPTokenizer:
    """OpenAI's vocabulary, which open_clip ships."""
    simple = open_clip.SimpleTokenizer()
    merges = sorted(simple.bpe_ranks, key=simple.bpe_ranks.__getitem__)
    vocabulary = {
        word.replace("<start_of_text>", "<|startoftext|>").replace("<end_of_text>", "<|endoftext|>"): i
        for word, i in simple.encoder.items()
    }
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


PILLOW_CLIP = Compose(
    [Resize(224, InterpolationMode.BICUBIC), CenterCrop(224), ToTensor(), Normalize(CLIP_MEAN, CLIP_STD)]
)
"""What the CLIP image processor of the published scripts does to a Pillow image."""


def clip_reward(kind: type[PickScore] | type[CLIPScore], size: str, device: torch.device) -> tuple[Reward, Original]:
    model, tokenizer = CLIPModel(clip_config(size)).eval(), clip_tokenizer()
    bilinear = kind is CLIPScore
    preprocessing = Preprocessing.torchvision(
        224, interpolation="bilinear" if bilinear else "bicubic", eight_bit=not bilinear
    )
    reward = kind(kind.__name__, model, tokenizer, preprocessing, device)
    floats = Compose([ToTensor(), Resize(224), CenterCrop(224), Normalize(CLIP_MEAN, CLIP_STD)])
    factor = 1.0 if bilinear else model.logit_scale.exp().item() / SCALE

    def original(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        scores = []
        for picture, prompt in zip(pictures, prompts, strict=True):
            pixels = (floats if bilinear else PILLOW_CLIP)(picture)[None].to(device)
            tokens = tokenizer(prompt, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
            image = model.get_image_features(pixel_values=pixels).pooler_output
            text = model.get_text_features(**tokens.to(device)).pooler_output
            scores.append(torch.cosine_similarity(image, text) * factor)
        return torch.cat(scores)

    return reward, original


def hpsv2(device: torch.device) -> tuple[Reward, Original]:
    model = open_clip.CLIP(**open_clip.get_model_config(HPSv2.architecture))
    reward = HPSv2("hpsv2", model, device)
    tokenizer = open_clip.get_tokenizer(HPSv2.architecture)

    def original(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        scores = []
        for picture, prompt in zip(pictures, prompts, strict=True):
            pixels = tv.resize(tv.to_tensor(picture), [224, 224], InterpolationMode.BICUBIC)
            pixels = tv.normalize(pixels, CLIP_MEAN, CLIP_STD)[None].to(device)
            image = model.encode_image(pixels, normalize=True)
            scores.append((image @ model.encode_text(tokenizer([prompt]).to(device), normalize=True).T)[0])
        return torch.cat(scores)

    return reward, original


def imagereward(device: torch.device) -> tuple[Reward, Original]:
    vision = BlipVisionModel(
        BlipVisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            image_size=224,
            patch_size=16,
            layer_norm_eps=1e-6,
        )
    ).eval()
    text = BlipTextModel(
        BlipTextConfig(encoder_hidden_size=1024, num_attention_heads=12, is_decoder=True), add_pooling_layer=False
    ).eval()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "red", "squares", "on", "blue", "table"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate([*words, *map(str, range(1000))])})
    head = ScoreHead(768)
    reward = ImageReward("imagereward", vision, text, head, tokenizer, device)

    def original(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        scores = []
        for i, prompt in enumerate(prompts):
            tokens = tokenizer(
                prompt, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            ).to(device)
            row = []
            for picture in pictures:
                seen = vision(pixel_values=PILLOW_CLIP(picture)[None].to(device)).last_hidden_state
                read = text(
                    input_ids=tokens.input_ids,
                    attention_mask=tokens.attention_mask,
                    encoder_hidden_states=seen,
                    encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=device),
                    is_decoder=False,
                ).last_hidden_state
                row.append(read[:, 0])
            scores.append(((head(torch.cat(row)) - MEAN) / STD)[i])
        return torch.stack(scores)

    return reward, original


def aesthetic(device: torch.device) -> tuple[Reward, Original]:
    clip, head = CLIPVisionModelWithProjection(clip_config("L").vision_config).eval(), ScoreHead(768)
    preprocessing = Preprocessing.torchvision(224, interpolation="bicubic", eight_bit=True)
    reward = Aesthetic("aesthetic", clip, head, preprocessing, device)

    def original(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        pixels = (PILLOW_CLIP(picture)[None].to(device) for picture in pictures)
        features = (clip(pixel_values=one).image_embeds for one in pixels)
        return torch.cat([head(one / one.norm(dim=-1, keepdim=True)) for one in features])

    return reward, original


MAKERS: dict[str, Callable[[torch.device], tuple[Reward, Original]]] = {
    "aesthetic": aesthetic,
    "clipscore": lambda device: clip_reward(CLIPScore, "L", device),
    "hpsv2": hpsv2,
    "imagereward": imagereward,
    "pickscore": lambda device: clip_reward(PickScore, "H", device),
}


def write(measured: list[Measured], device: torch.device) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {
        "question": "images a second of each reward, ours and the original's way",
        "statistic": "fastest repetition",
        "device": device_name(device),
        "torch": torch.__version__,
        "resolution": RESOLUTION,
        "aim": AIM,
        "results": [asdict(result) | {"ratio": round(result.ratio, 2)} for result in measured],
    }
    (RESULTS / "reward_throughput.json").write_text(json.dumps(content, indent=1) + "\n")
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(measured) + 1.2), layout="constrained")
    axes.barh([result.reward for result in measured], [result.ratio for result in measured])
    axes.axvline(AIM, color="grey", linestyle="--", label="aim on a GPU")
    axes.set_xlabel("images a second, over the original's way")
    axes.set_title(f"Rewards on {device_name(device)}")
    axes.legend()
    figure.savefig(RESULTS / "reward_throughput.png", dpi=110)


if __name__ == "__main__":
    main()
