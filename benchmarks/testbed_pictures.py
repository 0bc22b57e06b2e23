"""Draws docs/images/testbed.png: held-out captions, real pictures of them, and what the shipped base makes of them.

python benchmarks/testbed_pictures.py [--prompts 8]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Address, PromptEmbedding, WorkUnit
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.testbed.world import picture

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
REAL, BASE = 2, 6
"""Pictures per prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "testbed.png")
    arguments = parser.parse_args()
    config = load([ROOT / "configs" / "demo.yaml"])
    model, reward = models.load(config.model, "cpu"), rewards.load(config.rewards, "cpu")
    sampler = Sampler(config, model, reward, steps=config.rollout.regenerate.steps, micro_batch=BASE)
    prompts = read_prompts(config.prompts.heldout)[: arguments.prompts]
    figure, axes = plt.subplots(len(prompts), REAL + BASE, figsize=(REAL + BASE, 1.32 * len(prompts)))
    for row, prompt in zip(axes, prompts, strict=True):
        places = [Address(run_seed=0, purpose="reference", prompt_id=prompt.id, index=i) for i in range(REAL)]
        real = torch.stack([picture(prompt.text, place) for place in places])
        unit = WorkUnit(
            stage="evaluate", iteration=0, revision=0, prompt_id=prompt.id, indices=tuple(range(BASE)), policy="old"
        )
        (tensors,) = model.encode([prompt.text])
        base = sampler(unit, prompt, PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=""))
        scores = torch.cat([reward.score(real, [prompt.text] * REAL), base.rewards])
        for axis, image, score in zip(row, torch.cat([real, base.images.cpu()]), scores, strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{score:.2f}", fontsize=7, labelpad=1)
        row[0].set_title(prompt.text, fontsize=8, loc="left", pad=3)
    figure.suptitle(f"{REAL} real pictures, then {BASE} of the base; below each its reward", fontsize=9)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.93, wspace=0.05, hspace=0.42)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=90)


if __name__ == "__main__":
    main()
