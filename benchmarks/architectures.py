"""Published architectures: transformers, autoencoders, text encoders and reward networks as their checkpoints'
``config.json`` describes them.

`TINY` has settings in place of some of these, for a checkpoint of the same classes that a CPU runs in a second.
"""

from __future__ import annotations

from typing import Any

FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
SD3: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
SD3_MEDIUM: dict[str, Any] = SD3 | {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}
SANA: dict[str, Any] = {
    "in_channels": 32,
    "out_channels": 32,
    "num_layers": 20,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
    "sample_size": 32,
    "patch_size": 1,
}
DC_AE: dict[str, Any] = {
    "latent_channels": 32,
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "downsample_block_type": "Conv",
    "upsample_block_type": "interpolate",
    "scaling_factor": 0.41407,
}

QWEN_IMAGE: dict[str, Any] = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
QWEN_IMAGE_VAE: dict[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": (False, True, True),
}
Z_IMAGE: dict[str, Any] = {
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "cap_feat_dim": 2560,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}


def kl_autoencoder(scaling: float, shift: float) -> dict[str, Any]:
    return {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "scaling_factor": scaling,
        "shift_factor": shift,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
}
"""Text encoder of CLIP ViT-L/14."""
CLIP_H: dict[str, Any] = CLIP_L | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "projection_dim": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}
CLIP_BIG_G: dict[str, Any] = CLIP_H | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": False,
    "use_cache": False,
}
GEMMA_2_2B: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
QWEN_3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN_2_5_VL_7B: dict[str, Any] = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": False,
}
VISION_L: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}
VISION_H: dict[str, Any] = VISION_L | {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "hidden_act": "gelu",
}

TINY_CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY_CLIP |= {"projection_dim": 32}
"""Of a text encoder and of a vision tower."""
_TINY_QWEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_QWEN |= {"num_key_value_heads": 1}
TINY: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    "SD3Transformer2DModel": {
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 16,
        "sample_size": 8,
        "dual_attention_layers": (),
    },
    "SanaTransformer2DModel": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "sample_size": 2,
    },
    "QwenImageTransformer2DModel": {
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    },
    "ZImageTransformer2DModel": {
        "dim": 48,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dims": [8, 8, 8],
        "axes_lens": [512, 32, 32],
    },
    "AutoencoderKL": {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
    "AutoencoderDC": {
        "encoder_block_out_channels": (8, 8, 8, 32, 32, 32),
        "decoder_block_out_channels": (8, 8, 8, 32, 32, 32),
        "encoder_layers_per_block": (1,) * 6,
        "decoder_layers_per_block": (1,) * 6,
    },
    "AutoencoderKLQwenImage": {"base_dim": 8, "num_res_blocks": 1},
    "CLIPTextModel": TINY_CLIP,
    "CLIPTextModelWithProjection": TINY_CLIP,
    "T5EncoderModel": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    "Gemma2Model": _TINY_QWEN | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Qwen3ForCausalLM": _TINY_QWEN | {"head_dim": 16},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": QWEN_2_5_VL_7B["text_config"]
        | _TINY_QWEN
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    },
}
"""Class → settings that replace the published ones. Decoders keep their pixels a latent cell; widths of text fit."""
