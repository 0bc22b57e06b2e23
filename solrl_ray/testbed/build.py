"""Builds the testbed's assets: ``python -m solrl_ray.testbed.build --out FOLDER --device cuda``.

Writes ``pipeline/`` (a FluxPipeline), ``reward/`` (a CLIPModel with its processor) and ``prompts/``; weights are
safetensors in BF16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from transformers import CLIPModel, CLIPProcessor

from solrl_ray.testbed.architecture import flux_pipeline, reward_model
from solrl_ray.testbed.world import FIELD_VALUES, Scene

TRAIN_PROMPTS = 2048
HELDOUT_PROMPTS = 96
PIPELINE_SEED, REWARD_SEED, PROMPT_SEED = 1, 2, 3


def prompt_sets(seed: int = PROMPT_SEED) -> tuple[list[str], list[str]]:
    """Train and held-out captions; no two of them, in either set, describe the same pictures."""
    random = np.random.Generator(np.random.Philox(seed))
    captions: dict[tuple[int, ...], str] = {}
    while len(captions) < TRAIN_PROMPTS + HELDOUT_PROMPTS:
        count = 1 if random.random() < 1 / 16 else 2
        indices = [int(random.integers(len(values))) for values in FIELD_VALUES]
        if count == 1:
            indices[3:7] = [0] * 4
        scene = Scene((count, *indices))
        captions.setdefault(scene.meaning, scene.caption)
    texts = list(captions.values())
    return texts[HELDOUT_PROMPTS:], texts[:HELDOUT_PROMPTS]


def save(folder: Path, pipeline: FluxPipeline, reward: tuple[CLIPModel, CLIPProcessor]) -> None:
    """Writes `pipeline/`, `reward/` and `prompts/` into `folder`, weights rounded once to BF16."""
    pipeline.to(torch.bfloat16).save_pretrained(folder / "pipeline")
    model, processor = reward
    model.to(torch.bfloat16).save_pretrained(folder / "reward")
    processor.save_pretrained(folder / "reward")
    (folder / "prompts").mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train", "heldout"), prompt_sets(), strict=True):
        (folder / "prompts" / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    save(arguments.out, flux_pipeline(PIPELINE_SEED), reward_model(REWARD_SEED))


if __name__ == "__main__":
    main()
