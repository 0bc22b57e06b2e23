"""Builds the testbed's assets, about 12 minutes on one GPU::

    python -m solrl_ray.testbed.build --out FOLDER --device cuda

Writes ``pipeline/`` (a FluxPipeline), ``reward/`` (a CLIPModel with its processor), ``prompts/`` and
``build.json`` (what each stage measured). Weights are safetensors in BF16. Each stage starts from what the
one before it saved, so the stages may also run one by one (``--stages rectification``).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_model
from torch import nn
from transformers import CLIPModel, CLIPProcessor

from solrl_ray.testbed import captions
from solrl_ray.testbed.architecture import flux_pipeline, reward_model
from solrl_ray.testbed.flow_matching import rectify, train_flow
from solrl_ray.testbed.pretraining import Training, train_autoencoder, train_reward
from solrl_ray.testbed.world import FIELD_VALUES, Scene, parse

TRAIN_PROMPTS = 2048
HELDOUT_PROMPTS = 96
PIPELINE_SEED, REWARD_SEED, PROMPT_SEED = 1, 2, 3

AUTOENCODER = Training(steps=3000, batch=256, lr=2e-3, seed=11)
REWARD = Training(steps=4000, batch=768, lr=1e-3, seed=12)
FLOW = Training(steps=6000, batch=1024, lr=1.5e-3, seed=13, averaging=0.9995)
RECTIFICATION = Training(steps=5000, batch=1024, lr=8e-4, seed=14, averaging=0.999)
PICTURES = 1 << 18
PAIRS = 3 << 16
CORRUPTION = 0.25
"""Share of caption words replaced: sets how far the base is from the reward of real pictures."""

PIPELINE_PARTS = ("vae", "text_encoder", "text_encoder_2", "transformer")
STAGES = ("untrained", "autoencoder", "reward", "flow", "rectification")


def prompt_sets(seed: int = PROMPT_SEED) -> tuple[list[str], list[str]]:
    """Train and held-out captions; no two of them, in either set, describe the same pictures."""
    random = np.random.Generator(np.random.Philox(seed))
    texts: dict[int, str] = {}
    while len(texts) < TRAIN_PROMPTS + HELDOUT_PROMPTS:
        count = 1 if random.random() < 1 / 16 else 2
        indices = [int(random.integers(len(values))) for values in FIELD_VALUES]
        if count == 1:
            indices[3:7] = [0] * 4
        scene = Scene((count, *indices))
        texts.setdefault(int(captions.meaning(torch.tensor([scene.fields]))), scene.caption)
    chosen = list(texts.values())
    return chosen[HELDOUT_PROMPTS:], chosen[:HELDOUT_PROMPTS]


def build(folder: Path, stages: list[str], device: torch.device, scale: float = 1.0) -> None:
    """Runs `stages` in order over the assets in `folder`; `scale` < 1 shortens them, for a trial."""
    heldout = captions.meaning(torch.tensor([parse(text).fields for text in prompt_sets()[1]]))
    record_path = folder / "build.json"
    for stage in stages:
        start = time.perf_counter()
        if stage == "untrained":
            _save_prompts(folder)
            _save(folder, flux_pipeline(PIPELINE_SEED), reward_model(REWARD_SEED))
            continue
        pipeline, (reward, processor) = _load(folder)
        if stage == "autoencoder":
            result = train_autoencoder(pipeline.vae, _scaled(AUTOENCODER, scale), device)
        elif stage == "reward":
            result = train_reward(reward, _scaled(REWARD, scale), heldout, device)
        elif stage == "flow":
            training, pictures = _scaled(FLOW, scale), round(PICTURES * scale)
            result = train_flow(
                pipeline, training, pictures=pictures, corruption=CORRUPTION, heldout=heldout, device=device
            )
        else:
            training, pairs = _scaled(RECTIFICATION, scale), round(PAIRS * scale)
            result = rectify(pipeline, training, pairs=pairs, heldout=heldout, device=device)
        _save(folder, pipeline, (reward, processor))
        record = json.loads(record_path.read_text()) if record_path.exists() else {}
        record[stage] = {**result, "seconds": time.perf_counter() - start}
        record_path.write_text(json.dumps(record, indent=1) + "\n")
        print(stage, json.dumps(record[stage]), flush=True)


def _scaled(training: Training, scale: float) -> Training:
    if scale == 1.0:
        return training
    steps, batch = (max(2, round(value * scale)) for value in (training.steps, training.batch))
    return replace(training, steps=steps, batch=batch)


def _load(folder: Path) -> tuple[FluxPipeline, tuple[CLIPModel, CLIPProcessor]]:
    """The networks of `architecture` with the folder's weights (so that saved files do not name the folder)."""
    pipeline, (reward, processor) = flux_pipeline(PIPELINE_SEED), reward_model(REWARD_SEED)
    for name in PIPELINE_PARTS:
        _load_weights(getattr(pipeline, name), folder / "pipeline" / name)
    _load_weights(reward, folder / "reward")
    vae = json.loads((folder / "pipeline" / "vae" / "config.json").read_text())
    pipeline.vae.register_to_config(**{key: vae[key] for key in ("shift_factor", "scaling_factor")})
    return pipeline, (reward, processor)


def _load_weights(module: nn.Module, folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    load_model(module, path)  # which handles tied weights, stored once


def _save(folder: Path, pipeline: FluxPipeline, reward: tuple[CLIPModel, CLIPProcessor]) -> None:
    """Writes `pipeline/` and `reward/`, weights rounded to BF16."""
    pipeline.to("cpu", torch.bfloat16).save_pretrained(folder / "pipeline")
    model, processor = reward
    model.to("cpu", torch.bfloat16).save_pretrained(folder / "reward")
    processor.save_pretrained(folder / "reward")


def _save_prompts(folder: Path) -> None:
    (folder / "prompts").mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train", "heldout"), prompt_sets(), strict=True):
        (folder / "prompts" / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--scale", type=float, default=1.0, help="shortens every stage, to try the machinery")
    arguments = parser.parse_args()
    # cuDNN's attention has failed in FLUX-class training (illegal memory access on an H200, torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    build(arguments.out, arguments.stages, torch.device(arguments.device), arguments.scale)


if __name__ == "__main__":
    main()
