"""Very small checkpoints, as in `tiny`, of Qwen-Image and Z-Image, whose text encoders are language models."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from full_size import qwen_image_template, qwen_processor, qwen_words, vision_tokens
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support import tiny


def qwen_vae() -> AutoencoderKLQwenImage:
    """For latents of 4 channels, a cell 2 pixels wide; it halves nothing in time."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[-0.7, 0.1, 0.9, -0.2],
        latents_std=[2.8, 1.4, 0.9, 2.0],
    )


def _vision_language(words: int, **tokens: int) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL; weights from the global generator."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": words,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [0],
            },
            **tokens,
        )
    )


def _transformer(blocks: int, *, zero_cond_t: bool = False) -> QwenImageTransformer2DModel:
    """Weights from the global generator. `zero_cond_t`: references are at noise level 0, as in Qwen-Image-Edit-2511."""
    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        zero_cond_t=zero_cond_t,
    )


def build_qwen_image(folder: Path, *, blocks: int = 2, seed: int = 5) -> Path:
    """Write a Qwen-Image-class pipeline in float32 and return its folder."""
    tokenizer = qwen_words(qwen_image_template())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder, transformer = _vision_language(len(tokenizer)), _transformer(blocks)
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
            ),
            vae=qwen_vae(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def build_qwen_image_edit(folder: Path, *, blocks: int = 2, seed: int = 7, zero_cond_t: bool = False) -> Path:
    """Write a Qwen-Image-Edit-class pipeline in float32, whose references are at least 32 pixels wide."""
    tokenizer = qwen_words(qwen_image_template(QwenImageEditPlusPipeline))
    processor = qwen_processor(tokenizer, max_pixels=512**2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = _vision_language(len(tokenizer), **vision_tokens(tokenizer))
        pipeline = QwenImageEditPlusPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
            ),
            vae=qwen_vae(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            processor=processor,
            transformer=_transformer(blocks, zero_cond_t=zero_cond_t),
        )
    pipeline.save_pretrained(folder)
    return folder


def build_z_image(folder: Path, *, seed: int = 6) -> Path:
    """Write a Z-Image-class pipeline in float32 and return its folder."""
    tokenizer = qwen_words("")
    tokenizer.chat_template = tiny.CHAT
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=24,
                intermediate_size=24,
                num_hidden_layers=2,  # the pipeline takes the last but one
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=12,
            )
        )
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=48,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=24,
            axes_dims=[8, 8, 8],
            axes_lens=[256, 32, 32],
        )
        with torch.no_grad():  # zeros when they are made, trained when published
            transformer.x_pad_token.normal_()
            transformer.cap_pad_token.normal_()
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=tiny.kl_vae(tiny=False),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder
