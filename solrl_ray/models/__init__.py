"""Diffusion models behind one small interface; each family is one class, and one line in `__init__.py` (`FAMILIES`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from solrl_ray.common.lazy_imports import import_large
from solrl_ray.config.guidance import Cfg
from solrl_ray.config.schema import Config, Model
from solrl_ray.errors import UserError
from solrl_ray.models import sizes
from solrl_ray.records import SampleShape

if TYPE_CHECKING:  # takes seconds; finding a checkpoint does not need it
    import torch

    from solrl_ray.models.base import DiffusionModel

__all__ = ["encoder_components", "family", "load", "scored"]


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
    pipeline: str = "DiffusionPipeline"
    """The diffusers class that loads the stock pipeline; this one takes the class that the checkpoint names."""
    frames: str = "num_frames"
    """The argument of the stock call for frames of a video."""
    cfg_arguments: Callable[[Cfg], dict[str, Any]] | None = None
    """What switches guidance on in such a call; None: the family has none."""
    embeds_guidance: bool = False
    """Whether its transformers may take the value of a guidance embedding."""
    keeps_references: Callable[[SampleShape], bool] = lambda shape: True
    """Whether its stock pipeline takes reference pictures of this size as they are."""
    tools: bool = True
    """Whether ComfyUI and kohya's scripts have its models (`policy.tool_names`)."""


def _embedded(model: Model) -> dict[str, Any]:
    return {"guidance_scale": model.guidance}


def _scale(cfg: Cfg) -> dict[str, Any]:
    return {"guidance_scale": cfg.scale, "negative_prompt": cfg.negative_prompt}


def _true_scale(cfg: Cfg) -> dict[str, Any]:
    return {"true_cfg_scale": cfg.scale, "negative_prompt": cfg.negative_prompt}


def _of_z_image(cfg: Cfg) -> dict[str, Any]:
    """Its pipeline adds the scaled difference to the prompt's velocity, and stops near the image."""
    stop = {"cfg_truncation": 1 - cfg.interval[0]} if cfg.interval[0] else {}
    return _scale(cfg) | {"guidance_scale": cfg.scale - 1} | stop


def _of_a_megapixel(shape: SampleShape) -> bool:
    """Qwen-Image-Edit's pipeline brings them to this area, with sides of whole 32 pixels."""
    scale = math.sqrt(MEGAPIXEL / shape.pixels)
    return all(round(side * scale / 32) * 32 == side for side in (shape.height, shape.width))


MEGAPIXEL = 1024**2
SCALE_1, TRUE_SCALE_1 = {"guidance_scale": 1.0}, {"true_cfg_scale": 1.0}
SANA_ARGUMENTS = SCALE_1 | {"complex_human_instruction": None, "use_resolution_binning": False}
SANA_CONVOLUTIONS = ("ff.conv_inverted", "ff.conv_point")
FAMILIES = {
    "flux": Family("flux:Flux", sizes.FLUX, _embedded, cfg_arguments=_true_scale, embeds_guidance=True),
    "flux2_klein": Family(
        "flux2_klein:Flux2KleinSeeing",
        sizes.FLUX2_KLEIN,
        lambda _: SCALE_1,
        cfg_arguments=lambda cfg: {"guidance_scale": cfg.scale},
        keeps_references=lambda shape: shape.pixels <= MEGAPIXEL,
    ),
    "flux_kontext": Family(
        "flux:FluxKontext",
        sizes.FLUX_KONTEXT,
        # Else its pipeline brings samples to 1024² pixels, and references to a published size.
        lambda model: _embedded(model) | {"max_area": model.shapes[0].pixels, "_auto_resize": False},
        cfg_arguments=_true_scale,
        embeds_guidance=True,
    ),
    "qwen_image": Family("qwen_image:QwenImage", sizes.QWEN_IMAGE, lambda _: TRUE_SCALE_1, cfg_arguments=_true_scale),
    "qwen_image_edit": Family(
        "qwen_image_edit:QwenImageEdit",
        sizes.QWEN_IMAGE_EDIT,
        lambda _: TRUE_SCALE_1,
        cfg_arguments=_true_scale,
        keeps_references=_of_a_megapixel,
    ),
    "sana": Family(
        "sana:Sana", sizes.SANA, lambda _: SANA_ARGUMENTS, SANA_CONVOLUTIONS, cfg_arguments=_scale, tools=False
    ),
    "sana_video": Family(
        "sana:SanaVideo",
        sizes.SANA_VIDEO,
        lambda _: SANA_ARGUMENTS,
        SANA_CONVOLUTIONS,
        frames="frames",
        cfg_arguments=_scale,
        tools=False,
    ),
    "sd3": Family("sd3:StableDiffusion3", sizes.SD3, lambda _: SCALE_1, cfg_arguments=_scale),
    "wan": Family("wan:Wan", sizes.WAN, lambda _: SCALE_1, cfg_arguments=_scale),
    "wan21_i2v": Family("wan_i2v:Wan21I2V", sizes.WAN21_I2V, lambda _: SCALE_1, cfg_arguments=_scale),
    "wan_i2v": Family(
        "wan_i2v:WanI2V",
        sizes.WAN_I2V,
        lambda _: SCALE_1,
        pipeline="WanImageToVideoPipeline",
        cfg_arguments=_scale,
    ),
    "z_image": Family("z_image:ZImage", sizes.Z_IMAGE, lambda _: {"guidance_scale": 0.0}, cfg_arguments=_of_z_image),
}
"""By ``model.family``."""
DISTILLED = {
    "black-forest-labs/FLUX.1-schnell",
    "black-forest-labs/FLUX.2-klein-4B",
    "black-forest-labs/FLUX.2-klein-9B",
    "stabilityai/stable-diffusion-3.5-large-turbo",
    "Tongyi-MAI/Z-Image-Turbo",
}
"""Ids of checkpoints with built-in guidance. Other files do not tell, except FLUX.2's index."""


def scored(config: Config) -> tuple[SampleShape, ...]:
    """The shapes that rewards get: of samples, then of previews that are decoded from some latent frames."""
    shapes, chosen = config.model.shapes, config.rollout.preview.latent_frames
    made_by = FAMILIES.get(config.model.family)
    if not chosen or made_by is None:
        return tuple(shapes)
    return *shapes, *shapes.with_frames(made_by.sizes.frames(len(chosen)))


def family(config: Model) -> type[DiffusionModel]:
    """The class of ``model.family``. Raises `UserError` if there is no such family."""
    if config.family not in FAMILIES:
        raise UserError(f"model.family is {config.family!r}; it must be one of {', '.join(sorted(FAMILIES))}.")
    module, _, name = FAMILIES[config.family].source.partition(":")
    found: type[DiffusionModel] = getattr(import_large(f"{__name__}.{module}"), name)
    return found


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
