"""Text-to-image models behind one small interface; one file a family."""

from __future__ import annotations

from collections.abc import Collection

import torch

from solrl_ray.config.schema import Model
from solrl_ray.models.base import COMPONENTS, DiffusionModel, check_components
from solrl_ray.models.flux import Flux

__all__ = ["DiffusionModel", "load"]

FAMILIES: dict[str, type[Flux]] = {"flux": Flux}


def load(config: Model, device: torch.device | str, *, components: Collection[str] = COMPONENTS) -> DiffusionModel:
    """Load the wanted components (``text``, ``transformer``, ``vae``) of `config.path` onto `device`.

    Raises `UserError` naming ``model.path`` if the checkpoint is not there, incomplete or of another family.
    """
    return FAMILIES[config.family].load(config, device, check_components(components))
