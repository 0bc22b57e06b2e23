"""Autoencoders that decode latents to images: that of the checkpoint, or a small one for previews."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from solrl_ray.config.schema import Decoding, Model
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.models.libraries import diffusers

if TYPE_CHECKING:
    from torch import nn

PREVIEW_KEY = "model.preview_decoder"


def preview_loader(
    config: Model, vae_config: Mapping[str, Any], classes: Collection[str]
) -> Callable[..., nn.Module] | None:
    """A function that loads ``model.preview_decoder`` (argument ``torch_dtype``); None if the key is empty.

    Raises `UserError` if the decoder is missing, or if its latents have another number of channels or another downscale
    factor than the VAE's.
    """
    if not config.preview_decoder:
        return None
    source = paths.checkpoint(config.preview_decoder, PREVIEW_KEY)
    settings = paths.read_json(source, "config.json", PREVIEW_KEY)
    name = str(settings.get("_class_name"))
    if name not in classes:
        raise UserError(
            f"{PREVIEW_KEY} is {config.preview_decoder!r}, which is a {name!r}; "
            f"model.family {config.family!r} decodes with {', '.join(sorted(classes))}."
        )
    given = (_channels(settings), factor(settings))
    needed = (_channels(vae_config), factor(vae_config))
    if given != needed:
        raise UserError(
            f"{PREVIEW_KEY} is {config.preview_decoder!r}, for latents of {given[0]} channels and {given[1]} pixels "
            f"per cell; {config.path} has {needed[0]} channels and {needed[1]} pixels per cell."
        )
    return partial(paths.load_weights, getattr(diffusers, name), source, PREVIEW_KEY)


def set_tiling(decoder: Any, decoding: Decoding) -> Any:
    """Enable decoding in overlapping tiles if configured; this needs less memory, and seams are blended."""
    if decoding.tiling:
        decoder.enable_tiling()
    return decoder


def factor(settings: Mapping[str, Any]) -> int:
    """Downscale factor: pixels per side of a latent cell. In stock pipelines, each level but the first halves."""
    if settings.get("scale_factor_spatial"):  # Wan; its newer autoencoder also splits pixels into patches
        return int(settings["scale_factor_spatial"])
    if "temperal_downsample" in settings:  # diffusers' spelling; one value per halving, in video autoencoders
        return int(2 ** len(settings["temperal_downsample"]))
    levels = settings.get("block_out_channels") or settings["encoder_block_out_channels"]
    return int(2 ** (len(levels) - 1))


def _channels(settings: Mapping[str, Any]) -> int | None:
    """Number of channels of a latent."""
    return settings.get("latent_channels", settings.get("z_dim"))
