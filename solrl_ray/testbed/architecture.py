"""The testbed's networks: a FLUX pipeline and a CLIP reward of stock classes, in miniature.

Their sizes are those of the shipped configurations, in ``assets/``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    T5Config,
    T5EncoderModel,
)

from solrl_ray.testbed.wordpieces import clip_tokenizer, t5_tokenizer

ASSETS = Path(__file__).parent / "assets"


def flux_pipeline(seed: int) -> FluxPipeline:
    """An untrained pipeline in float32, evaluation mode, on the CPU; its weights depend on `seed` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler.from_config(_config("pipeline/scheduler/scheduler_config.json")),
            # These two are computed when it is trained.
            vae=AutoencoderKL.from_config(_config("pipeline/vae/config.json"), shift_factor=0.0, scaling_factor=1.0),
            text_encoder=CLIPTextModel(CLIPTextConfig(**_config("pipeline/text_encoder/config.json"))),
            tokenizer=clip_tokenizer(),
            text_encoder_2=T5EncoderModel(T5Config(**_config("pipeline/text_encoder_2/config.json"))),
            tokenizer_2=t5_tokenizer(),
            transformer=FluxTransformer2DModel.from_config(_config("pipeline/transformer/config.json")),
        )
    for module in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer):
        module.eval()
    return pipeline


def reward_model(seed: int) -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained CLIP for 32 × 32 pictures and its processor; float32, evaluation mode, on the CPU."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CLIPModel(CLIPConfig(**_config("reward/config.json")))
    images = CLIPImageProcessorPil(**_config("reward/processor_config.json")["image_processor"])
    return model.eval(), CLIPProcessor(image_processor=images, tokenizer=clip_tokenizer())


def _config(file: str) -> dict[str, Any]:
    """A shipped configuration, without the dtype of its weights."""
    config: dict[str, Any] = json.loads((ASSETS / file).read_text())
    config.pop("dtype", None)
    return config
