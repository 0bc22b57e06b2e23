"""Diffusion models behind one small interface; each family is one file, and its name in `FAMILY_FILES`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.records import SampleShape

if TYPE_CHECKING:  # takes seconds; finding a checkpoint does not need it
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
"""Modules of this package that describe families. Importing one imports no model library."""
FAMILIES: Mapping[str, type[DiffusionModel]] = {
    name: model for file in FAMILY_FILES for name, model in sorted(import_module(f"{__name__}.{file}").FAMILIES.items())
}
"""By ``model.family``."""
DISTILLED = frozenset[str]().union(*(model.DISTILLED for model in FAMILIES.values()))
"""Ids of checkpoints with built-in guidance."""


def scored(config: Config) -> tuple[SampleShape, ...]:
    """The shapes that rewards get: of samples, then of previews that are decoded from some latent frames."""
    shapes, chosen = config.model.shapes, config.rollout.preview.latent_frames
    made_by = FAMILIES.get(config.model.family)
    if not chosen or made_by is None:
        return tuple(shapes)
    return *shapes, *shapes.with_frames(made_by.SIZES.frames(len(chosen)))


def family(config: Model) -> type[DiffusionModel]:
    """The class of ``model.family``. Raises `UserError` if there is no such family."""
    if config.family not in FAMILIES:
        raise UserError(f"model.family is {config.family!r}; it must be one of {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[config.family]


def encoder_components(config: Model) -> frozenset[str]:
    """The components with which a prompt is encoded."""
    return frozenset({"text", "vae"} if config.references else {"text"})


def load(config: Model, device: torch.device | str, *, components: Collection[str] | None = None) -> DiffusionModel:
    """Load components onto `device`: ``text``, ``transformer``, ``vae``, ``preview_decoder``; None: the first three.

    Raises `UserError` naming the key (usually ``model.path``) if the checkpoint is missing, incomplete or of another
    family, or if sizes do not fit it.
    """
    from solrl_ray.models.components import COMPONENTS, check_components

    return family(config).load(config, device, check_components(COMPONENTS if components is None else components))
