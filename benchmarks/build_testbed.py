"""Trains the testbed's networks anew, with the settings, tokenizers and prompts that the package ships: minutes on one
GPU.

    python benchmarks/build_testbed.py OUT [--device cuda] [--scale 1.0]

Writes a copy of solrl_ray/testbed/assets with other weights, and build.json: what each stage measured. Weights are
rounded to BF16 after each stage. Another build gives another model, because training on a GPU is not reproducible bit
for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from testbed_assets import captions
from testbed_assets.flow_matching import rectify, train_flow
from testbed_assets.networks import ASSETS, Training, flux_pipeline, reward_model, train_autoencoder, train_reward
from torch import nn

from solrl_ray.testbed.world import parse

PIPELINE_SEED, REWARD_SEED = 1, 2
AUTOENCODER = Training(steps=3000, batch=256, lr=2e-3, seed=11)
REWARD = Training(steps=4000, batch=768, lr=1e-3, seed=12)
FLOW = Training(steps=6000, batch=1024, lr=1.5e-3, seed=13, averaging=0.9995)
RECTIFICATION = Training(steps=5000, batch=1024, lr=8e-4, seed=14, averaging=0.999)
PICTURES = 1 << 18
PAIRS = 3 << 16
CORRUPTION = 0.25
"""Share of caption words replaced: sets how far the base is from the reward of real pictures."""


def build(folder: Path, device: torch.device, scale: float = 1.0) -> None:
    """Train all and write it; `scale` < 1 shortens every stage, to try the machinery."""
    heldout_texts = (ASSETS / "prompts" / "heldout.txt").read_text().splitlines()
    heldout = captions.meaning(torch.tensor([parse(text).fields for text in heldout_texts]))
    pipeline, (reward, processor) = flux_pipeline(PIPELINE_SEED), reward_model(REWARD_SEED)
    parts = pipeline.components.items()
    networks: dict[str, Any] = {f"pipeline/{name}": part for name, part in parts if isinstance(part, nn.Module)}
    networks["reward"] = reward

    def scaled(training: Training) -> Training:
        steps, batch = (max(2, round(value * scale)) for value in (training.steps, training.batch))
        return replace(training, steps=steps, batch=batch)

    stages: dict[str, Callable[[], dict[str, float]]] = {
        "autoencoder": lambda: train_autoencoder(pipeline.vae, scaled(AUTOENCODER), device),
        "reward": lambda: train_reward(reward, processor.tokenizer, scaled(REWARD), heldout, device),
        "flow": lambda: train_flow(
            pipeline,
            scaled(FLOW),
            pictures=round(PICTURES * scale),
            corruption=CORRUPTION,
            heldout=heldout,
            device=device,
        ),
        "rectification": lambda: rectify(
            pipeline, scaled(RECTIFICATION), pairs=round(PAIRS * scale), heldout=heldout, device=device
        ),
    }
    record = {}
    for name, stage in stages.items():
        began = time.perf_counter()
        result = stage()
        for part in networks.values():
            nn.Module.float(nn.Module.to(part, torch.bfloat16))  # diffusers would warn of both
        record[name] = {**result, "seconds": time.perf_counter() - began}
        print(name, json.dumps(record[name]), flush=True)
    shutil.copytree(ASSETS, folder)
    for name, part in networks.items():
        nn.Module.to(part, "cpu", torch.bfloat16).save_pretrained(folder / name)
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    # cuDNN's attention has failed in FLUX-class training (illegal memory access on an H200, torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    build(arguments.out, torch.device(arguments.device), arguments.scale)


if __name__ == "__main__":
    main()
