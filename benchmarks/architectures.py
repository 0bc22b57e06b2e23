"""Published architectures from architectures.yaml: settings of transformers, autoencoders, text encoders, rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Settings = dict[str, Any]
READ: dict[str, Settings] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FLUX, SD3, SD3_MEDIUM, SANA = READ["FLUX"], READ["SD3"], READ["SD3_MEDIUM"], READ["SANA"]
FLUX2_KLEIN_4B, FLUX2_KLEIN_9B = READ["FLUX2_KLEIN_4B"], READ["FLUX2_KLEIN_9B"]
QWEN_IMAGE, Z_IMAGE, DC_AE, QWEN_IMAGE_VAE = (READ[n] for n in ("QWEN_IMAGE", "Z_IMAGE", "DC_AE", "QWEN_IMAGE_VAE"))
SANA_VIDEO = READ["SANA_VIDEO"]
WAN_1_3B, WAN_14B, WAN22_5B, UMT5_XXL = READ["WAN_1_3B"], READ["WAN_14B"], READ["WAN22_5B"], READ["UMT5_XXL"]
WAN_I2V_14B = READ["WAN_I2V_14B"]
LATENTS = {f"latents_{name}": [value] * 48 for name, value in (("mean", 0.0), ("std", 1.0))}
WAN_VAE, WAN22_VAE = READ["WAN_VAE"], READ["WAN22_VAE"] | LATENTS
CLIP_L, CLIP_H, CLIP_BIG_G, T5_XXL = READ["CLIP_L"], READ["CLIP_H"], READ["CLIP_BIG_G"], READ["T5_XXL"]
GEMMA_2_2B, QWEN_2_5_VL_7B = READ["GEMMA_2_2B"], READ["QWEN_2_5_VL_7B"]
QWEN_3_4B, QWEN_3_8B = READ["QWEN_3_4B"], READ["QWEN_3_8B"]
VISION_L, VISION_H = READ["VISION_L"], READ["VISION_H"]
TINY = READ["TINY"]
"""Class → settings that replace the published ones."""


def kl_autoencoder(scaling: float, shift: float) -> Settings:
    return READ["KL_AUTOENCODER"] | {"scaling_factor": scaling, "shift_factor": shift}
