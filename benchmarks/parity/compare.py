"""Do our rewards compute the same pixels and scores as the original packages? `make parity`.

    python benchmarks/parity/compare.py ENVIRONMENT/bin/python [--full]

Generates images and prompts, scores them with `originals.py` in an environment with the packages `hpsv2` and
`image-reward`, loads the checkpoints written there with our loaders, and prints the largest differences. Exits with
status 1 if one exceeds its bound. Weights are random, which does not change the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.rewards.base import CheckpointReward
from solrl_ray.rewards.hpsv2 import HPSv2
from solrl_ray.rewards.imagereward import ImageReward
from solrl_ray.rewards.preprocessing import eight_bits

PIXELS_BOUND = 2e-6
"""Bound for normalised pixels (1 is about 69 of 255): float32 rounding."""
SCORE_BOUND = 1e-5
SIZES = ((512, 512), (512, 512), (224, 224), (300, 412), (412, 300), (640, 360), (97, 61), (225, 230))
PROMPTS = (
    "a red square",
    "a photo of an astronaut riding a horse on mars, 4k, highly detailed",
    "Two BLUE circles & a café — naïve",
    "don't",
    "42 sheep, one of them black",
    "a red square",
    " ".join(["a very long prompt about mountains and rivers"] * 20),
    "x",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="Python of the environment with the original packages")
    parser.add_argument("--full", action="store_true", help="the published sizes: minutes, 8 GB of memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pictures = write(folder)
        script = Path(__file__).parent / "originals.py"
        command = [arguments.python, str(script), str(folder), *(["--full"] if arguments.full else [])]
        subprocess.run(command, check=True)
        originals = torch.load(folder / "originals.pt")
        failed = compare(folder, pictures, originals)
    sys.exit(1 if failed else 0)


def write(folder: Path) -> list[Tensor]:
    """Write prompts, a BERT vocabulary and images, from smooth to noisy, to `folder`; returns the images, [3, H, W]."""
    (folder / "pictures").mkdir()
    (folder / "bert").mkdir()
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    letters = "abcdefghijklmnopqrstuvwxyz0123456789'&,"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        "red",
        "very",
    ]
    words += [f"[unused{i}]" for i in range(30522 - len(words))]
    (folder / "bert" / "vocab.txt").write_text("\n".join(words))
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for i, (height, width) in enumerate(SIZES):
        coarse = torch.rand(1, 3, 8, 8, generator=generator)
        smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
        noise = torch.rand(1, 3, height, width, generator=generator)
        picture = eight_bits(torch.lerp(smooth, noise, i / len(SIZES)))[0]
        file = folder / "pictures" / f"{i}.png"
        Image.fromarray(picture.byte().permute(1, 2, 0).numpy()).save(file)
        pictures.append(picture / 255)
    return pictures


def compare(folder: Path, pictures: list[Tensor], originals: dict) -> bool:
    architecture = originals["hpsv2"]["architecture"]
    assert open_clip.get_model_config(architecture)

    class TestedHPSv2(HPSv2):
        pass

    TestedHPSv2.architecture = architecture
    rewards: dict[str, type[CheckpointReward]] = {"hpsv2": TestedHPSv2, "imagereward": ImageReward}
    loaded: dict[str, Any] = {}
    for kind, made in rewards.items():
        base = str(folder / "bert") if kind == "imagereward" else ""
        config = RewardConfig(kind=kind, path=str(folder), base=base)
        loaded[kind] = made(config, "cpu", keys=str, name=kind)
    failed = False
    print(f"{'reward':<12} {'images':>8} {'scores from … to':>22} {'pixels differ by':>17} {'scores differ by':>17}")
    for kind, reward in loaded.items():
        theirs = originals[kind]
        pixels = torch.cat([reward._preprocessing(picture[None]) for picture in pictures])
        scores = [
            reward.score(picture[None], [prompt]).item() for picture, prompt in zip(pictures, PROMPTS, strict=True)
        ]
        batch = [i for i, size in enumerate(SIZES) if size == SIZES[0]]
        together = reward.score(torch.stack([pictures[i] for i in batch]), [PROMPTS[i] for i in batch])
        pixel = (pixels - theirs["pixels"]).abs().max().item()
        score = max(abs(ours - original) for ours, original in zip(scores, theirs["scores"], strict=True))
        score = max(score, *(abs(together[n].item() - theirs["scores"][i]) for n, i in enumerate(batch)))
        span = f"{min(theirs['scores']):.5f} … {max(theirs['scores']):.5f}"
        print(f"{kind:<12} {len(pictures):>8} {span:>22} {pixel:>17.1e} {score:>17.1e}")
        failed |= pixel > PIXELS_BOUND or score > SCORE_BOUND
    print(f"bounds: pixels {PIXELS_BOUND:.0e}, scores {SCORE_BOUND:.0e}: {'EXCEEDED' if failed else 'kept'}")
    return failed


if __name__ == "__main__":
    main()
