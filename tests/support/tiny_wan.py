"""Very small checkpoints, as in `tiny`, of Wan 2.1, Wan 2.2 TI2V and SANA-Video."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.support import tiny

FRAMES = 9
"""Three latent frames: the autoencoder has the published stride of 4."""
CHANNELS = 4
OWN: dict[str, object] = {
    "frames": FRAMES,
    "quantization": {"skip": ["condition_embedder"]},
    "schedule": {"kind": "flow_shift", "shift": 3.0},
}
"""What the `model` section of a configuration says for Wan besides family, path and size."""


def wan_vae() -> AutoencoderKLWan:
    """As Wan 2.1's, a latent cell 4 pixels wide."""
    return AutoencoderKLWan(**_autoencoder(), scale_factor_spatial=4)


def wan22_vae() -> AutoencoderKLWan:
    """As Wan 2.2's: with residual blocks and patches of 2x2 pixels, so that a latent cell is 8 pixels wide."""
    channels = {"in_channels": 12, "out_channels": 12}
    return AutoencoderKLWan(
        **_autoencoder(), **channels, decoder_base_dim=4, is_residual=True, patch_size=2, scale_factor_spatial=8
    )


def _autoencoder() -> dict[str, object]:
    return {
        "base_dim": 4,
        "z_dim": CHANNELS,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [-0.7, 0.1, 0.9, -0.2],
        "latents_std": [2.8, 1.4, 0.9, 2.0],
        "scale_factor_temporal": 4,
    }


def build_wan(folder: Path, *, version: str = "2.1", blocks: int = 2, seed: int = 7) -> Path:
    """Write a Wan-class pipeline in float32, of `version` 2.1 or 2.2, and return its folder."""
    tokenizer = tiny.t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
        )
        transformer = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=32,
            freq_dim=16,
            ffn_dim=64,
            num_layers=blocks,
            rope_max_seq_len=32,
        )
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=wan_vae() if version == "2.1" else wan22_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=transformer,
            expand_timesteps=version != "2.1",
        )
    pipeline.save_pretrained(folder)
    return folder


def build_wan_i2v(folder: Path) -> Path:
    """A checkpoint of Wan 2.2 TI2V, whose video begins with a given picture."""
    return build_wan(folder, version="2.2")


def build_wan21_i2v(folder: Path) -> Path:
    """A checkpoint of Wan 2.1 I2V, which sees a picture through CLIP and as further channels."""
    build_wan(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        image_encoder = CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                projection_dim=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=8,
            )
        )
        # Text of 512 tokens is fixed in the stock transformer.
        settings = WanTransformer3DModel.load_config(folder / "transformer")
        more = {"in_channels": 4 + 2 * CHANNELS, "image_dim": 32, "added_kv_proj_dim": 32}
        transformer = WanTransformer3DModel.from_config({**settings, **more})
        tokenizer = tiny.t5_tokenizer()
        tokenizer.model_max_length = 512
        pipeline = WanImageToVideoPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder"),
            vae=wan_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            image_processor=CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
            image_encoder=image_encoder,
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def build_sana_video(folder: Path, *, blocks: int = 2, seed: int = 8) -> Path:
    """Write a SANA-Video-class pipeline in float32, with Wan 2.1's autoencoder, and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder, tokenizer = tiny.gemma()
        transformer = SanaVideoTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=blocks,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
            rope_max_seq_len=32,
        )
        pipeline = SanaVideoPipeline(
            tokenizer, text_encoder, wan_vae(), transformer, FlowMatchEulerDiscreteScheduler(shift=3.0)
        )
    pipeline.save_pretrained(folder)
    return folder
