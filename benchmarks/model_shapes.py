"""Writes the tensor shapes of the shipped models into the package: `solrl plan` reads them instead of a checkpoint.

python benchmarks/model_shapes.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import architectures as published
import torch
from common import CONFIGS, MODELS, PROMPTS
from full_size import TRANSFORMERS
from torch import nn
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    Gemma2Model,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ForCausalLM,
    T5EncoderModel,
    UMT5EncoderModel,
)

from solrl_ray import models
from solrl_ray.config.loading import load
from solrl_ray.config.schema import Model
from solrl_ray.models import decoders, shapes
from solrl_ray.models.components import blocks
from solrl_ray.models.paths import BUILTIN
from solrl_ray.models.shapes import ModelShapes
from solrl_ray.planning.model_facts import parameters

T5, QWEN_3 = (T5EncoderModel, published.T5_XXL), (Qwen3ForCausalLM, published.QWEN_3_4B)
SD3 = [(CLIPTextModelWithProjection, settings) for settings in (published.CLIP_L, published.CLIP_BIG_G)]
TEXTS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "flux1_dev": [(CLIPTextModel, published.CLIP_L), T5],
    "flux1_kontext_dev": [(CLIPTextModel, published.CLIP_L), T5],
    "flux2_klein_base_4b": [QWEN_3],
    "flux2_klein_base_9b": [(Qwen3ForCausalLM, published.QWEN_3_8B)],
    **{
        name: [(Qwen2_5_VLForConditionalGeneration, published.QWEN_2_5_VL_7B)]
        for name in ("qwen_image", "qwen_image_2512", "qwen_image_edit", "qwen_image_edit_2511")
    },
    "sana_1600m": [(Gemma2Model, published.GEMMA_2_2B)],
    "sana_video_2b": [(Gemma2Model, published.GEMMA_2_2B)],
    "sd35_large": [*SD3, T5],
    "sd35_medium": [*SD3, T5],
    **{
        name: [(UMT5EncoderModel, published.UMT5_XXL)]
        for name in ("wan21_1_3b", "wan21_14b", "wan22_5b", "wan22_5b_i2v")
    },
    "wan21_14b_i2v": [(CLIPVisionModel, published.VISION_H), (UMT5EncoderModel, published.UMT5_XXL)],
    "z_image": [QWEN_3],
}
"""Preset in configs/models → classes and settings of its text encoders, the one for long prompts last."""
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flux2_klein_base_4b": (published.FLUX2_KLEIN_4B, published.kl_autoencoder(1.0, 0.0)),
    "flux2_klein_base_9b": (published.FLUX2_KLEIN_9B, published.kl_autoencoder(1.0, 0.0)),
    **{name: TRANSFORMERS["qwen_image"][1:] for name in ("qwen_image_2512", "qwen_image_edit_2511")},
    **{Path(file).stem: TRANSFORMERS[name][1:] for name, file in MODELS.items()},
    "wan21_14b_i2v": (published.WAN_I2V_14B, published.WAN_VAE),
    "wan22_5b_i2v": TRANSFORMERS["wan22"][1:],
}
"""Preset in configs/models → settings of its transformer and of its autoencoder."""


def configuration(name: str) -> Model:
    return load([CONFIGS / f"models/{name}.yaml", CONFIGS / "rewards/testbed_clip.yaml"], [PROMPTS]).model


def made(name: str) -> ModelShapes:
    """The shapes of one preset in configs/models, computed from its architecture."""
    config = configuration(name)
    family = models.family(config)
    if config.path.startswith(BUILTIN):
        transformer, factor = family.settings(config)
    else:
        transformer, autoencoder = PUBLISHED[name]
        factor = decoders.factor(autoencoder)
    with torch.device("meta"):
        skeleton = family.adapt_(family.TRANSFORMER.from_config(transformer))
        texts = [kind(kind.config_class(**settings)) for kind, settings in TEXTS.get(name, ())]
    texts = texts or list(family.text_skeletons(config).values())
    linears = {path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    return ModelShapes(
        family=config.family,
        transformer=transformer,
        factor=factor,
        blocks=len(blocks(skeleton)),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        buffers=sum(buffer.numel() for buffer in skeleton.buffers()),
        linears={path: shapes.LinearShape(linear.in_features, linear.out_features) for path, linear in linears.items()},
        texts=[parameters(text) for text in texts],
    )


def written(made: ModelShapes, path: str) -> str:
    """The shapes as JSON. Equal blocks share one entry: ``blocks.*.to_q`` → inputs, outputs, first block, last + 1."""
    entries = dict[str, list[list[int]]]()
    for name, shape in made.linears.items():
        number = re.search(r"\.(\d+)\.", name)
        key, index = (name.replace(number[0], ".*.", 1), int(number[1])) if number else (name, 0)
        ranges = entries.setdefault(key, [])
        size = [shape.in_features, shape.out_features]
        if ranges and ranges[-1][:2] == size and ranges[-1][3] == index:
            ranges[-1][3] += 1
        else:
            ranges.append([*size, index, index + 1])
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(ranges)}" for key, ranges in entries.items())
    head = {
        "path": path,
        "family": made.family,
        "transformer": {key: made.transformer[key] for key in shapes.SETTINGS if key in made.transformer},
        "factor": made.factor,
        "blocks": made.blocks,
        "parameters": made.parameters,
        "buffers": made.buffers,
        "texts": list(made.texts),
    }
    fields = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{fields} "linears": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    shapes.FOLDER.mkdir(exist_ok=True)
    for name in (*PUBLISHED, "testbed"):
        (shapes.FOLDER / f"{name}.json").write_text(written(made(name), configuration(name).path))
        print(shapes.FOLDER / f"{name}.json")
