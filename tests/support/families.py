"""A very small checkpoint of every model family, of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from solrl_ray.config.schema import Model
from solrl_ray.models import FAMILIES
from tests.support import tiny, tiny_qwen, tiny_wan

BUILDERS: dict[str, Callable[..., Path]] = {
    "chroma": tiny.build_chroma,
    "flux": tiny.build_pipeline,
    "flux2_klein": tiny.build_flux2_klein,
    "flux_kontext": tiny.build_kontext,
    "qwen_image": tiny_qwen.build_qwen_image,
    "qwen_image_edit": tiny_qwen.build_qwen_image_edit,
    "sana": tiny.build_sana,
    "sana_video": tiny_wan.build_sana_video,
    "sd3": tiny.build_sd3,
    "wan": tiny_wan.build_wan,
    "wan21_i2v": tiny_wan.build_wan21_i2v,
    "wan_i2v": tiny_wan.build_wan_i2v,
    "z_image": tiny_qwen.build_z_image,
}
"""Family → what writes its checkpoint into a folder, and returns the folder."""

OWN: dict[str, dict[str, object]] = {
    "wan": tiny_wan.OWN,
    "wan21_i2v": tiny_wan.OWN | {"max_sequence_length": 512},
    "wan_i2v": tiny_wan.OWN,
    "sana_video": {"frames": tiny_wan.FRAMES},
}
"""Family → what else the `model` section of a configuration says for it."""


def resolution(family: str) -> int:
    """Side of its pictures, pixels. SANA's pipelines take multiples of 32, and references are at least 32."""
    return 32 if family.startswith("sana") or family == "qwen_image_edit" else tiny.RESOLUTION


def model_config(family: str, checkpoint: Path, **changes: object) -> Model:
    """The `model` section of a configuration for its checkpoint, with `changes`."""
    own = {"family": family, "resolution": resolution(family), "references": FAMILIES[family].SIZES.references[0]}
    if family == "qwen_image_edit":
        own["max_sequence_length"] = 256  # 205 of the picture
    return tiny.model_config(checkpoint, **own | OWN.get(family, {}) | changes)
