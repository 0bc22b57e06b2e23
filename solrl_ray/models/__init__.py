"""Text-to-image models behind one small interface; each family is one file, and one line here."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError

if TYPE_CHECKING:  # takes seconds; finding a checkpoint does not need it
    import torch

    from solrl_ray.models.base import DiffusionModel

__all__ = ["family", "load"]

FAMILIES = {
    "flux": "solrl_ray.models.flux:Flux",
    "flux2_klein": "solrl_ray.models.flux2_klein:Flux2Klein",
    "qwen_image": "solrl_ray.models.qwen_image:QwenImage",
    "sana": "solrl_ray.models.sana:Sana",
    "sd3": "solrl_ray.models.sd3:StableDiffusion3",
    "z_image": "solrl_ray.models.z_image:ZImage",
}
"""``model.family`` → module and class, imported when first asked for."""

CONVOLUTIONS = {"sana": ("ff.conv_inverted", "ff.conv_point")}
"""``model.family`` → path endings of linears that are 1×1 convolutions in the checkpoint and in its LoRA files.

Not in the family's class: saving a LoRA needs only this, and importing the class takes seconds.
"""


def family(config: Model) -> type[DiffusionModel]:
    """The class of ``model.family``. Raises `UserError` if there is no such family."""
    if config.family not in FAMILIES:
        raise UserError(f"model.family is {config.family!r}; it must be one of {', '.join(sorted(FAMILIES))}.")
    module, _, name = FAMILIES[config.family].partition(":")
    found: type[DiffusionModel] = getattr(import_large(module), name)
    return found


def load(config: Model, device: torch.device | str, *, components: Collection[str] | None = None) -> DiffusionModel:
    """Load components onto `device`: ``text``, ``transformer``, ``vae``, ``preview_decoder``; None: the first three.

    Raises `UserError` naming the key (usually ``model.path``) if the checkpoint is missing, incomplete or of another
    family, or if sizes do not fit it.
    """
    from solrl_ray.models.base import COMPONENTS, check_components

    return family(config).load(config, device, check_components(COMPONENTS if components is None else components))
