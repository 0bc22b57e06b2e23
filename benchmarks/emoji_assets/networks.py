"""The untrained networks of the emoji example: a FLUX pipeline's components, and the CLIPs of reward and judge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    resolution: int = 96
    tokens: int = 4096
    """Maximum vocabulary size of a tokenizer."""
    length: int = 24
    """Tokens per text."""
    channels: tuple[int, ...] = (64, 128, 128)
    """Channels of the autoencoder, from full resolution down; each further level halves the resolution."""
    latent_channels: int = 8
    heads: int = 6
    axes: tuple[int, int, int] = (16, 24, 24)
    """Dimensions of the rotary embedding per axis; their sum is the width of a head."""
    double_blocks: int = 2
    single_blocks: int = 9
    t5_width: int = 256
    t5_layers: int = 4
    clip_width: int = 192
    clip_layers: int = 2
    """Layers of the pipeline's CLIP text encoder."""
    reward_width: int = 256
    reward_layers: int = 6
    reward_patch: int = 8

    @property
    def factor(self) -> int:
        """Pixels per latent cell, along one side."""
        return int(2 ** (len(self.channels) - 1))

    @property
    def side(self) -> int:
        """Image tokens along one side of an image."""
        return self.resolution // (2 * self.factor)


FULL = Sizes()
"""The transformer has 32 million parameters."""
TINY = Sizes(
    resolution=32,
    tokens=700,
    length=12,
    channels=(16, 32, 32),
    latent_channels=4,
    heads=2,
    axes=(8, 12, 12),
    double_blocks=1,
    single_blocks=2,
    t5_width=64,
    t5_layers=1,
    clip_width=64,
    clip_layers=1,
    reward_width=64,
    reward_layers=2,
)
"""For tests."""


def pipeline(sizes: Sizes, clip_tokenizer: Any, t5_tokenizer: Any) -> FluxPipeline:
    """A pipeline in float32 on the CPU; weights depend on torch's global seed."""
    transformer = FluxTransformer2DModel(
        in_channels=4 * sizes.latent_channels,
        patch_size=1,
        num_layers=sizes.double_blocks,
        num_single_layers=sizes.single_blocks,
        attention_head_dim=sum(sizes.axes),
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.t5_width,
        pooled_projection_dim=sizes.clip_width,
        guidance_embeds=False,
        axes_dims_rope=sizes.axes,
    )
    levels = len(sizes.channels)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=sizes.channels,
        layers_per_block=1,
        latent_channels=sizes.latent_channels,
        norm_num_groups=16,
        sample_size=sizes.resolution,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
        shift_factor=0.0,  # both are computed after training
        scaling_factor=1.0,
    )
    t5 = T5Config(
        vocab_size=len(t5_tokenizer),
        d_model=sizes.t5_width,
        d_kv=64 if sizes.t5_width > 64 else 16,
        num_heads=4,
        d_ff=2 * sizes.t5_width,
        num_layers=sizes.t5_layers,
        num_decoder_layers=sizes.t5_layers,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=t5_tokenizer.pad_token_id,
        eos_token_id=t5_tokenizer.eos_token_id,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        shift=3.0,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=CLIPTextModel(_clip_text(sizes, clip_tokenizer, sizes.clip_width, sizes.clip_layers)),
        tokenizer=clip_tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def clip(sizes: Sizes, tokenizer: Any) -> CLIPModel:
    """A CLIP for the pipeline's image size and texts; float32, on the CPU, weights depend on torch's global seed."""
    text = _clip_text(sizes, tokenizer, sizes.reward_width, sizes.reward_layers // 2)
    vision = dict(
        hidden_size=sizes.reward_width,
        intermediate_size=4 * sizes.reward_width,
        num_hidden_layers=sizes.reward_layers,
        num_attention_heads=max(1, sizes.reward_width // 64),
        image_size=sizes.resolution,
        patch_size=sizes.reward_patch,
        projection_dim=sizes.reward_width,
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision, projection_dim=sizes.reward_width))


def save_clip(model: CLIPModel, tokenizer: Any, folder: Path) -> None:
    """Save a CLIP as a checkpoint of kind ``clipscore``, in bfloat16."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = model.config.vision_config.image_size
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1) + "\n")


def _clip_text(sizes: Sizes, tokenizer: Any, width: int, layers: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=sizes.length,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
