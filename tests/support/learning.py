"""Samples, embeddings and configurations for tests of learning; values come from explicit generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from solrl_ray.config.schema import Config
from solrl_ray.records import PromptEmbedding, SampleGroup
from tests.support.tiny import T5_TOKENS, model_config

LATENT_SHAPE = (16, 16)
"""Of the tiny pipeline: image tokens × channels."""


def config(pipeline: Path, *, learner: dict[str, Any] | None = None, **sections: Any) -> Config:
    """A run of the tiny pipeline: 5 full steps of which 3 are trained on, micro-batches of 4."""
    values: dict[str, Any] = {
        "run": {"seed": 7},
        "model": model_config(pipeline),
        "prompts": {"train": "unused.txt", "heldout": "unused.txt"},
        "rewards": [{"kind": "clipscore"}],
        "rollout": {"explore": {"precision": "nvfp4-emulated"}, "regenerate": {"steps": 5}},
        "objective": {"timestep_fraction": 0.6},
        "learner": {"micro_batch": 4, "activation_memory": 1, "optimizer": {"lr": 1e-2}, **(learner or {})},
    }
    values |= sections
    values["objective"] = {"kind": "diffusion_nft", **values["objective"]}  # as loading completes it
    return Config.model_validate(values)


def groups(iteration: int, *, sizes: tuple[int, ...] = (4, 3, 3)) -> list[SampleGroup]:
    """One group a prompt, `sizes[i]` samples of prompt ``p<i>``, drawn by revision `iteration`."""
    generator = torch.Generator().manual_seed(100 + iteration)
    return [
        SampleGroup(
            iteration=iteration,
            revision=iteration,
            prompt_id=f"p{i}",
            indices=tuple(range(2 * size, size, -1)),
            rewards=tuple(torch.rand(size, generator=generator).tolist()),
            latents=torch.randn(size, *LATENT_SHAPE, generator=generator),
        )
        for i, size in enumerate(sizes)
    ]


def embeddings(prompts: int = 3) -> dict[str, PromptEmbedding]:
    """Of prompts ``p0``, ``p1``, …, by id."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for i in range(prompts):
        tensors = {
            "prompt_embeds": torch.randn(T5_TOKENS, 32, generator=generator),
            "pooled_prompt_embeds": torch.randn(32, generator=generator),
        }
        made[f"p{i}"] = PromptEmbedding(prompt_id=f"p{i}", tensors=tensors, digest=f"digest of p{i}")
    return made
