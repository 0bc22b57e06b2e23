"""Very small checkpoints of the real classes, written to a folder with random weights and local tokenizers.

They have everything a published checkpoint has (the same classes, files, tokenizers and configuration keys)
and a few ten thousand parameters: a test that loads one takes the code path of a real model in milliseconds.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderTiny,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from solrl_ray.config.schema import Lora, Model, QuantizationScope, SigmaSchedule

RESOLUTION = 16
"""Pixels; with the VAE's factor 2 and 2x2 patches that makes 16 image tokens."""
CLIP_TOKENS = 16
T5_TOKENS = 12
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level BPE without merges: one token a character."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = list(letters) + [letter + "</w>" for letter in letters]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in string.ascii_letters + string.digits]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def _text_config(tokenizer: CLIPTokenizer, projection: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=projection,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(tokenizer: T5Tokenizer, width: int = 32) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )


def kl_vae(tiny: bool) -> AutoencoderKL | AutoencoderTiny:
    if tiny:
        return AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            latent_channels=4,
        )
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.36,
        shift_factor=0.12,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def flux_transformer(*, guidance_embeds: bool = False) -> FluxTransformer2DModel:
    """Of one block of each kind; weights from the global generator."""
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )


def build_kontext(folder: Path) -> Path:
    """`build_pipeline` with a guidance embedding, as a checkpoint of `FluxKontextPipeline`."""
    return build_pipeline(folder, guidance_embeds=True, pipeline_class=FluxKontextPipeline)


def build_pipeline(
    folder: Path,
    *,
    guidance_embeds: bool = False,
    tiny_vae: bool = False,
    seed: int = 0,
    pipeline_class: Any = FluxPipeline,
) -> Path:
    """Write a FLUX-class pipeline of about 80 thousand parameters in float32 and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = clip_tokenizer(), t5_tokenizer()
        transformer = flux_transformer(guidance_embeds=guidance_embeds)
        pipeline = pipeline_class(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=kl_vae(tiny_vae),
            text_encoder=CLIPTextModel(_text_config(tokenizer, projection=32)),
            tokenizer=tokenizer,
            text_encoder_2=_t5(tokenizer_2),
            tokenizer_2=tokenizer_2,
            transformer=transformer,
        )
    pipeline.save_pretrained(folder)
    return folder


def build_chroma(folder: Path, *, seed: int = 5) -> Path:
    """Write a Chroma-class pipeline in float32 and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = t5_tokenizer()
        pipeline = ChromaPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=kl_vae(tiny=False),
            text_encoder=_t5(tokenizer),
            tokenizer=tokenizer,
            transformer=ChromaTransformer2DModel(
                in_channels=16,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                axes_dims_rope=(4, 4, 8),
                approximator_num_channels=16,
                approximator_hidden_dim=32,
                approximator_layers=1,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder


def build_sd3(folder: Path, *, t5: bool = True, dual_attention: bool = True, seed: int = 2) -> Path:
    """Write an SD3-class pipeline in float32 and return its folder; SD3.5-Medium's blocks have a second attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
        transformer = SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=48,
            pos_embed_max_size=8,
            dual_attention_layers=(0,) if dual_attention else (),
            qk_norm="rms_norm",
        )
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=kl_vae(tiny=False),
            text_encoder=CLIPTextModelWithProjection(_text_config(tokenizer, projection=32)),
            tokenizer=tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(_text_config(tokenizer, projection=16)),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=_t5(tokenizer_3, width=64) if t5 else None,
            tokenizer_3=tokenizer_3 if t5 else None,
        )
    pipeline.save_pretrained(folder)
    return folder


def gemma() -> tuple[Gemma2Model, GemmaTokenizer]:
    """A text encoder 32 wide, with weights from the global generator, and its tokenizer."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *string.ascii_lowercase, *string.digits]
    tokenizer = GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=64)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
    )
    return Gemma2Model(config), tokenizer


def build_sana(folder: Path, *, blocks: int = 2, seed: int = 3) -> Path:
    """Write a SANA-class pipeline in float32, whose stock call takes multiples of 32 pixels, and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder, tokenizer = gemma()
        transformer = SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=blocks,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=32,
            sample_size=8,
        )
        vae = AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8, 16),
            decoder_block_out_channels=(8, 8, 16),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), (5,)),
            decoder_qkv_multiscales=((), (), (5,)),
            downsample_block_type="Conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41,
        )
        scheduler = FlowMatchEulerDiscreteScheduler()
        pipeline = SanaPipeline(tokenizer, text_encoder, vae, transformer, scheduler)
    pipeline.save_pretrained(folder)
    return folder


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}0"


def build_flux2_klein(folder: Path, *, seed: int = 4) -> Path:
    """Write a FLUX.2-klein-class pipeline in float32 and return its folder."""
    pieces = ["<|endoftext|>", "Ġ", *string.ascii_lowercase, *string.digits]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=64, chat_template=CHAT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=27,  # the pipeline takes the 9th, 18th and 27th
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
            )
        )
        transformer = Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        )
        vae = AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
        )
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2.0)
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        pipeline = Flux2KleinPipeline(scheduler, vae, text_encoder, tokenizer, transformer)
    pipeline.save_pretrained(folder)
    return folder


def build_clip(folder: Path, *, image_size: int = 16, mean_std: float = 0.4, seed: int = 1) -> Path:
    """Write a CLIPModel with its tokenizer and image processor and return its folder."""
    tokenizer = clip_tokenizer()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": 4,
        "projection_dim": 24,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text = _text_config(tokenizer, projection=24).to_dict()
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": image_size},
        crop_size={"height": image_size, "width": image_size},
        image_mean=[mean_std, mean_std + 0.1, mean_std - 0.1],
        image_std=[0.25, 0.3, 0.2],
    ).save_pretrained(folder)
    return folder


def model_config(path: Path | str, **changes: object) -> Model:
    """The `model` section of a configuration for `build_pipeline`'s checkpoint, with `changes`."""
    fields: dict[str, object] = {
        "family": "flux",
        "path": str(path),
        "dtype": "float32",
        "resolution": RESOLUTION,
        "max_sequence_length": T5_TOKENS,
        "schedule": SigmaSchedule(kind="linear"),
        "lora": Lora(rank=4, alpha=8.0, targets=TARGETS),
        "quantization": QuantizationScope(),
    }
    return Model.model_validate(fields | changes)
