"""Diffusion models behind one small interface. Each family is one file, listed in `FAMILY_FILES`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

if TYPE_CHECKING:  # importing torch takes seconds; finding a checkpoint does not need it
    import torch

    from solrl_ray.models.base import DiffusionModel

__all__ = ["encoder_components", "family", "load", "scored"]

FAMILY_FILES = (
    "chroma",
    "flux",
    "flux2_klein",
    "qwen_image",
    "qwen_image_edit",
    "sana",
    "sd3",
    "wan",
    "wan_i2v",
    "z_image",
)
"""Modules of this package that define families. Importing them imports no model library."""
FAMILIES: Mapping[str, type[DiffusionModel]] = {
    name: model for file in FAMILY_FILES for name, model in sorted(import_module(f"{__name__}.{file}").FAMILIES.items())
}
"""``model.family`` → class of the family."""
DISTILLED = frozenset[str]().union(*(model.DISTILLED for model in FAMILIES.values()))
"""Ids of checkpoints with built-in guidance."""


def scored(config: Config) -> tuple[SampleShape, ...]:
    """The shapes that rewards score: those of samples, and those of previews if only some latent frames are decoded."""
    shapes, latent_frames = config.model.shapes, config.rollout.preview.latent_frames
    model = FAMILIES.get(config.model.family)
    if not latent_frames or model is None:
        return tuple(shapes)
    return *shapes, *shapes.with_frames(model.SIZES.frames(len(latent_frames)))


def family(config: Model) -> type[DiffusionModel]:
    """The class of ``model.family``. Raises `UserError` if the family is unknown."""
    if config.family not in FAMILIES:
        raise UserError(f"model.family is {config.family!r}; it must be one of {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[config.family]


def encoder_components(config: Model) -> frozenset[str]:
    """The components that are needed to encode a prompt."""
    return frozenset({"text", "vae"} if config.references else {"text"})


def load(config: Model, device: torch.device | str, *, components: Collection[str] | None = None) -> DiffusionModel:
    """Load components onto `device`: ``text``, ``transformer``, ``vae``, ``preview_decoder``; None: the first three.

    Raises `UserError` naming the key (usually ``model.path``) if the checkpoint is missing, incomplete, of another
    family, or does not support the configured sizes.
    """
    from solrl_ray.models.components import COMPONENTS, check_components

    return family(config).load(config, device, check_components(COMPONENTS if components is None else components))
