"""A very small checkpoint of every model family, of the real classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from solrl_ray.config.schema import Model
from solrl_ray.models import FAMILIES
from tests.support import tiny, tiny_qwen

BUILDERS: dict[str, Callable[..., Path]] = {
    "flux": tiny.build_pipeline,
    "flux2_klein": tiny.build_flux2_klein,
    "flux_kontext": tiny.build_kontext,
    "qwen_image": tiny_qwen.build_qwen_image,
    "qwen_image_edit": tiny_qwen.build_qwen_image_edit,
    "sana": tiny.build_sana,
    "sd3": tiny.build_sd3,
    "z_image": tiny_qwen.build_z_image,
}
"""Family → what writes its checkpoint into a folder, and returns the folder."""


def resolution(family: str) -> int:
    """Side of its pictures, pixels. SANA's autoencoder makes them twice as large, and references are at least 32."""
    return 32 if family in ("sana", "qwen_image_edit") else tiny.RESOLUTION


def model_config(family: str, checkpoint: Path, **changes: object) -> Model:
    """The `model` section of a configuration for its checkpoint, with `changes`."""
    sizes = {"resolution": resolution(family), "references": FAMILIES[family].sizes.references[0]}
    if family == "qwen_image_edit":
        sizes["max_sequence_length"] = 256  # 205 of the picture
    return tiny.model_config(checkpoint, **{"family": family} | sizes | changes)
