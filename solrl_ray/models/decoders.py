"""Autoencoders that turn latents into images: the checkpoint's own, or a small one for previews."""

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
    """The loader of ``model.preview_decoder``, which takes a ``torch_dtype``; None if the key is empty.

    Raises `UserError` if the decoder is missing, or if its latents have other channels or cells than the VAE's.
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
    found = (_channels(settings), factor(settings))
    needed = (_channels(vae_config), factor(vae_config))
    if found != needed:
        raise UserError(
            f"{PREVIEW_KEY} is {config.preview_decoder!r}, for latents of {found[0]} channels and {found[1]} pixels "
            f"a cell; {config.path} has {needed[0]} channels and {needed[1]} pixels a cell."
        )
    return partial(paths.load_weights, getattr(diffusers, name), source, PREVIEW_KEY)


def set_tiling(decoder: Any, decoding: Decoding) -> Any:
    """Decode in overlapping tiles if configured: less memory, with blended seams."""
    if decoding.tiling:
        decoder.enable_tiling()
    return decoder


def factor(settings: Mapping[str, Any]) -> int:
    """Pixels per latent cell and side, as in the stock pipelines: each level after the first halves."""
    if settings.get("scale_factor_spatial"):  # of Wan, whose newer autoencoder also splits pixels into patches
        return int(settings["scale_factor_spatial"])
    if "temperal_downsample" in settings:  # diffusers' spelling; a video autoencoder has a value for each halving
        return int(2 ** len(settings["temperal_downsample"]))
    levels = settings.get("block_out_channels") or settings["encoder_block_out_channels"]
    return int(2 ** (len(levels) - 1))


def _channels(settings: Mapping[str, Any]) -> int | None:
    """Of a latent."""
    return settings.get("latent_channels", settings.get("z_dim"))
