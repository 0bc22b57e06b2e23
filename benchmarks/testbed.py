"""Is the testbed a fair stand-in? Rewards of real pictures, also of another prompt, of the base's, and of noise.

    python benchmarks/testbed.py [--prompts 32] [--seeds 24]

Held-out prompts and the production path (checkpoint, sampler, decoder, CLIPScore) with `configs/demo.yaml`; how well
previews rank there, `rank_fidelity.py` says. Prints a table, writes testbed.json, and draws docs/images/testbed.png:
captions, real pictures of them, and what the base makes of them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from solrl_ray import models, rewards
from solrl_ray.config.loading import load
from solrl_ray.prompts.prompt_set import read_prompts
from solrl_ray.records import Address, Prompt, PromptEmbedding, WorkUnit
from solrl_ray.rollout.sampler import Sampler
from solrl_ray.testbed.world import picture

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
DRAWN, REAL, BASE = 8, 2, 6
"""Prompts that are drawn, and pictures of each."""
Row = tuple[str, Tensor, Tensor, Tensor, Tensor]
"""Caption; real pictures [seeds, 3, 32, 32] and their rewards [seeds]; the same of the base."""


def measure(prompts: int, seeds: int) -> tuple[dict[str, Tensor], list[Row]]:
    """Rewards [prompts, seeds] by kind of picture, and what can be drawn."""
    config = load([ROOT / "configs" / "demo.yaml"])
    model, reward = models.load(config.model, "cpu"), rewards.load(config.rewards, "cpu")
    sampler = Sampler(config, model, reward, steps=config.rollout.regenerate.steps, micro_batch=seeds)
    chosen = read_prompts(config.prompts.heldout)[:prompts]
    generator = torch.Generator().manual_seed(0)

    def real(prompt: Prompt, text: str) -> Tensor:
        of_prompt = Address(run_seed=config.run.seed, purpose="reference", prompt_id=prompt.id)
        return torch.stack([picture(text, replace(of_prompt, index=i)) for i in range(seeds)])

    found: dict[str, list[Tensor]] = {}
    rows = []
    for prompt, following in zip(chosen, [*chosen[1:], chosen[0]], strict=True):
        (tensors,) = model.encode([prompt.text])
        unit = WorkUnit(
            stage="explore", iteration=0, revision=0, prompt_id=prompt.id, indices=tuple(range(seeds)), policy="old"
        )
        base = sampler(unit, prompt, PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=""))
        noise = [torch.randn(1, *model.latent_shape, generator=generator) for _ in range(seeds)]
        pictures = {
            "real pictures": real(prompt, prompt.text),
            "real pictures of another prompt": real(prompt, following.text),
            "decoded noise": torch.cat([model.decode(one) for one in noise]),
        }
        scores = {name: reward.score(images, [prompt.text] * seeds) for name, images in pictures.items()}
        for name, values in (scores | {"base, 10 steps": base.rewards}).items():
            found.setdefault(name, []).append(values)
        own = "real pictures"
        rows.append((prompt.text, pictures[own], scores[own], base.images.cpu(), base.rewards))
    return {name: torch.stack(values) for name, values in found.items()}, rows


def draw(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(len(rows), REAL + BASE, figsize=(REAL + BASE, 1.32 * len(rows)))
    for row, (caption, real, of_real, base, of_base) in zip(axes, rows, strict=True):
        images, scores = torch.cat([real[:REAL], base[:BASE]]), torch.cat([of_real[:REAL], of_base[:BASE]])
        for axis, image, score in zip(row, images, scores, strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{score:.2f}", fontsize=7, labelpad=1)
        row[0].set_title(caption, fontsize=8, loc="left", pad=3)
    figure.suptitle(f"{REAL} real pictures, then {BASE} of the base; below each its reward", fontsize=9)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.93, wspace=0.05, hspace=0.42)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    with torch.no_grad():
        found, rows = measure(arguments.prompts, arguments.seeds)
    content = {
        name: {"mean": float(values.mean()), "spread_in_prompt": float(values.std(dim=1, correction=0).mean())}
        for name, values in found.items()
    }
    for name, one in content.items():
        print(f"| {name} | {one['mean']:.3f} | {one['spread_in_prompt']:.3f} |")
    result = {"prompts": arguments.prompts, "seeds": arguments.seeds, "torch": torch.__version__, "pictures": content}
    (arguments.out / "testbed.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows[:DRAWN], arguments.images / "testbed.png")


if __name__ == "__main__":
    main()
