"""Decoding: a small decoder for previews, tiles, and the sentences for what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderTiny

from solrl_ray import models
from solrl_ray.config.schema import Decoding
from solrl_ray.errors import UserError
from solrl_ray.models import flux
from tests.support import tiny
from tests.support.tensors import randn as noise

PREVIEW = {"transformer", "preview_decoder"}


def small_decoder(folder: Path, *, channels: int = 4, levels: int = 2) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        AutoencoderTiny(
            encoder_block_out_channels=(8,) * levels,
            decoder_block_out_channels=(8,) * levels,
            num_encoder_blocks=(1,) * levels,
            num_decoder_blocks=(1,) * levels,
            latent_channels=channels,
        ).save_pretrained(folder)
    return folder


def test_previews_are_decoded_by_the_small_decoder_and_others_by_the_autoencoder(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    folder = small_decoder(tmp_path / "taesd")
    config = tiny.model_config(tiny_pipeline, preview_decoder=str(folder))
    latents = noise(2, 16, 16)
    preview = models.load(config, "cpu", components=PREVIEW).decode(latents)
    decoder = AutoencoderTiny.from_pretrained(folder).eval()
    with torch.no_grad():
        # It takes latents as they are: its scaling is 1 and it has no shift.
        expected = (decoder.decode(flux.unpack(latents, 4, 4)).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(preview, expected, atol=1e-6, rtol=0)

    full = models.load(config, "cpu", components={"vae"}).decode(latents)
    plain = models.load(tiny.model_config(tiny_pipeline), "cpu", components={"vae"}).decode(latents)
    assert torch.equal(full, plain)
    assert not torch.allclose(full, preview, atol=0.01)


def test_without_a_small_decoder_previews_are_decoded_by_the_autoencoder(tiny_pipeline: Path) -> None:
    config, latents = tiny.model_config(tiny_pipeline), noise(2, 16, 16)
    preview = models.load(config, "cpu", components=PREVIEW)
    assert preview.components == PREVIEW
    assert torch.equal(preview.decode(latents), models.load(config, "cpu", components={"vae"}).decode(latents))


@pytest.mark.parametrize(
    ("channels", "levels", "found"), [(3, 2, "3 channels and 2 pixels"), (4, 3, "4 channels and 4 pixels")]
)
def test_a_small_decoder_of_other_latents_is_refused_before_weights_are_loaded(
    tiny_pipeline: Path, tmp_path: Path, channels: int, levels: int, found: str
) -> None:
    folder = small_decoder(tmp_path / "other", channels=channels, levels=levels)
    config = tiny.model_config(tiny_pipeline, preview_decoder=str(folder))
    with pytest.raises(UserError, match=rf"^model\.preview_decoder is .*{found} per cell; .* has 4 channels and 2 pix"):
        models.load(config, "cpu", components=())


def test_a_small_decoder_that_is_not_there_or_none_is_refused(tiny_pipeline: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.preview_decoder is '/no/such', but there is no folder"):
        models.load(tiny.model_config(tiny_pipeline, preview_decoder="/no/such"), "cpu", components=())
    transformer = str(tiny_pipeline / "transformer")
    with pytest.raises(UserError, match=r"which is a 'FluxTransformer2DModel'; .*decodes with AutoencoderKL, "):
        models.load(tiny.model_config(tiny_pipeline, preview_decoder=transformer), "cpu", components=())


def test_tiles_are_decoded_as_the_stock_autoencoder_does(tiny_pipeline: Path) -> None:
    sizes = {"resolution": 64}  # tiles are 32 pixels here
    tiled = models.load(
        tiny.model_config(tiny_pipeline, decoding=Decoding(tiling=True), **sizes), "cpu", components={"vae"}
    )
    whole = models.load(tiny.model_config(tiny_pipeline, **sizes), "cpu", components={"vae"})
    latents = noise(1, *tiled.latent_shape)
    images = tiled.decode(latents)
    assert images.shape == (1, 3, 64, 64)
    vae = whole._module("vae")
    z = flux.unpack(latents, 16, 16) / vae.config["scaling_factor"] + vae.config["shift_factor"]  # type: ignore[index]
    with torch.no_grad():
        expected = vae.tiled_decode(z, return_dict=False)[0]  # type: ignore[operator]
    torch.testing.assert_close(images, (expected / 2 + 0.5).clamp(0, 1), atol=1e-6, rtol=0)
    assert not torch.equal(images, whole.decode(latents))
