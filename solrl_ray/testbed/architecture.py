"""The testbed's networks: a FLUX pipeline and a CLIP reward of stock classes, in miniature."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    T5Config,
    T5EncoderModel,
)

from solrl_ray.testbed.wordpieces import CLIP_TOKENS, clip_tokenizer, t5_tokenizer
from solrl_ray.testbed.world import RESOLUTION

LATENT_CHANNELS = 4
TEXT_WIDTH = 64


def flux_pipeline(seed: int) -> FluxPipeline:
    """An untrained pipeline in float32, evaluation mode, on the CPU; its weights depend on `seed` alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        clip, t5 = clip_tokenizer(), t5_tokenizer()
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
            ),
            vae=_autoencoder(),
            text_encoder=CLIPTextModel(_clip_text_config(len(clip), clip.bos_token_id, clip.eos_token_id)),
            tokenizer=clip,
            text_encoder_2=T5EncoderModel(_t5_config(len(t5))),
            tokenizer_2=t5,
            transformer=_transformer(),
        )
    for module in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer):
        module.eval()
    return pipeline


def reward_model(seed: int) -> tuple[CLIPModel, CLIPProcessor]:
    """An untrained CLIP for 32 × 32 pictures and its processor; float32, evaluation mode, on the CPU."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = clip_tokenizer()
        config = CLIPConfig(
            text_config=_clip_text_config(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id).to_dict(),
            vision_config={
                "hidden_size": 96,
                "intermediate_size": 192,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "image_size": RESOLUTION,
                "patch_size": 4,
            },
            projection_dim=64,
        )
        model = CLIPModel(config)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": RESOLUTION},
        crop_size={"height": RESOLUTION, "width": RESOLUTION},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return model.eval(), CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def _transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 14, 14),
    )


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=RESOLUTION,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _clip_text_config(vocabulary: int, start: int, end: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=64,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
    )


def _t5_config(vocabulary: int) -> T5Config:
    return T5Config(
        vocab_size=vocabulary,
        d_model=TEXT_WIDTH,
        d_kv=16,
        num_heads=4,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        is_encoder_decoder=False,
        use_cache=False,
    )
