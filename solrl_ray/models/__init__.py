"""Text-to-image models behind one small interface; each family is one file, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.schema import Model
from solrl_ray.errors import UserError
from solrl_ray.models import sizes

if TYPE_CHECKING:  # takes seconds; finding a checkpoint does not need it
    import torch

    from solrl_ray.models.base import DiffusionModel

__all__ = ["family", "load"]


@dataclass(frozen=True, slots=True)
class Family:
    """What is needed of a family without its class, whose import takes seconds."""

    source: str
    """Module of this package and class."""
    sizes: sizes.FamilySizes
    stock_arguments: Callable[[Model], dict[str, Any]]
    """What switches off classifier-free guidance and changes to the prompt in a call of the stock pipeline."""
    convolutions: tuple[str, ...] = ()
    """Path endings of linears that are 1×1 convolutions in the checkpoint and in its LoRA files."""


SANA_ARGUMENTS = {"guidance_scale": 1.0, "complex_human_instruction": None, "use_resolution_binning": False}
SANA_CONVOLUTIONS = ("ff.conv_inverted", "ff.conv_point")
FAMILIES = {
    "flux": Family("flux:Flux", sizes.FLUX, lambda model: {"guidance_scale": model.guidance}),
    "flux2_klein": Family("flux2_klein:Flux2Klein", sizes.FLUX2_KLEIN, lambda _: {"guidance_scale": 1.0}),
    "qwen_image": Family("qwen_image:QwenImage", sizes.QWEN_IMAGE, lambda _: {"true_cfg_scale": 1.0}),
    "sana": Family("sana:Sana", sizes.SANA, lambda _: SANA_ARGUMENTS, SANA_CONVOLUTIONS),
    "sd3": Family("sd3:StableDiffusion3", sizes.SD3, lambda _: {"guidance_scale": 1.0}),
    "z_image": Family("z_image:ZImage", sizes.Z_IMAGE, lambda _: {"guidance_scale": 0.0}),
}
"""By ``model.family``."""


def family(config: Model) -> type[DiffusionModel]:
    """The class of ``model.family``. Raises `UserError` if there is no such family."""
    if config.family not in FAMILIES:
        raise UserError(f"model.family is {config.family!r}; it must be one of {', '.join(sorted(FAMILIES))}.")
    module, _, name = FAMILIES[config.family].source.partition(":")
    found: type[DiffusionModel] = getattr(import_large(f"{__name__}.{module}"), name)
    return found


def load(config: Model, device: torch.device | str, *, components: Collection[str] | None = None) -> DiffusionModel:
    """Load components onto `device`: ``text``, ``transformer``, ``vae``, ``preview_decoder``; None: the first three.

    Raises `UserError` naming the key (usually ``model.path``) if the checkpoint is missing, incomplete or of another
    family, or if sizes do not fit it.
    """
    from solrl_ray.models.base import COMPONENTS, check_components

    return family(config).load(config, device, check_components(COMPONENTS if components is None else components))
