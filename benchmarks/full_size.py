"""Checkpoints of the published architectures with random weights: what a benchmark needs of a model it cannot download.

    python benchmarks/full_size.py flux OUT        # FLUX.1-dev, 11.9 B parameters, 24 GB in bfloat16
    python benchmarks/full_size.py sd3 OUT         # SD3.5-Large, 8.1 B, 16 GB
    python benchmarks/full_size.py sd3_medium OUT  # SD3.5-Medium, 2.2 B, 5 GB
    python benchmarks/full_size.py sana OUT        # SANA 1.6B at 1024 px, 3 GB
    python benchmarks/full_size.py qwen_image OUT  # Qwen-Image, 20.4 B, 41 GB
    python benchmarks/full_size.py z_image OUT     # Z-Image, 6.2 B, 12 GB
    python benchmarks/full_size.py clip OUT        # CLIP ViT-L/14, the network of CLIPScore

OUT becomes a diffusers pipeline folder (a transformers one for clip) that the product's own loaders read. The
transformer and the VAE have the published sizes. The text encoders have the published widths and one layer, because
they run once a prompt and nothing here measures them; tokenizers know the testbed's words. Times and memory of what
is at full size do not depend on the weights' values, rewards and rankings do and mean nothing here.
`--layers N` cuts the depth, for a try on a small machine.
"""

from __future__ import annotations

import argparse
import re
import string
import time
from pathlib import Path
from typing import Any

import torch
from architectures import DC_AE, FLUX, QWEN_IMAGE, QWEN_IMAGE_VAE, SANA, SD3, SD3_MEDIUM, Z_IMAGE, kl_autoencoder
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
)

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.models.base import DiffusionModel
from solrl_ray.records import PromptEmbedding
from solrl_ray.testbed.wordpieces import clip_tokenizer, t5_tokenizer, words

STD = 0.02
"""Of all random weights; norms are 1 and biases 0, so that a deep network's output stays of order 1."""
CLIP_LENGTH = 77
T5_LENGTH = 512
GEMMA_LENGTH = 300
QWEN_LENGTH = 2048
CHAT = (
    "{% for message in messages %}<|im_start|>user\n{{ message.content }}<|im_end|>\n<|im_start|>assistant\n"
    "{% endfor %}"
)
TEMPLATE_WORD = re.compile(r"<\|\w+\|>| ?[A-Za-z]+|[^\w ]")
"""Qwen's own tokenizer has one token for each of these in the templates around a prompt."""


@torch.no_grad()
def random_model(make: Any, device: str) -> Any:
    """A module built on the meta device and filled on `device` in bfloat16: seconds for 12 billion weights."""
    with torch.device("meta"):
        module = make()
    module = module.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point() or tensor.dim() == 0:
            tensor.zero_()
        elif tensor.dim() > 1:
            tensor.normal_(0.0, STD, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    return module.eval()


def clip_text(kind: Any, width: int, heads: int, device: str) -> Any:
    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=1 if kind is CLIPTextModel else 2,  # SD3 takes the last but one
        num_attention_heads=heads,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return kind(config).to(torch.bfloat16)


def clip_words() -> Any:
    tokenizer = clip_tokenizer()
    tokenizer.model_max_length = CLIP_LENGTH
    return tokenizer


def t5_text() -> tuple[Any, Any]:
    tokenizer = t5_tokenizer()
    tokenizer.model_max_length = T5_LENGTH
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=4096,
        d_kv=64,
        num_heads=4,
        d_ff=1024,
        num_layers=1,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return T5EncoderModel(config).to(torch.bfloat16), tokenizer


def gemma_text() -> tuple[Any, Any]:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "▁": 4}
    for letter in sorted({*"abcdefghijklmnopqrstuvwxyz0123456789,.-'", *"".join(words())}):
        vocabulary.setdefault(letter, len(vocabulary))
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=GEMMA_LENGTH)
    tokenizer.padding_side = "right"
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=2304,
        intermediate_size=2304,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=GEMMA_LENGTH,
    )
    return Gemma2Model(config).to(torch.bfloat16), tokenizer


def qwen_words(template: str) -> Any:
    """A byte-level BPE without merges: one token a character, but one a word for the words of `template`, so that a
    pipeline that cuts the template off by its number of tokens cuts it where it ends."""
    pieces = ["<|endoftext|>", "Ġ", "Ċ", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=QWEN_LENGTH, chat_template=CHAT)
    tokenizer.add_tokens(sorted(word for word in set(TEMPLATE_WORD.findall(template)) if len(word) > 1))
    return tokenizer


def qwen_image_template() -> str:
    """What the pipeline puts around a prompt."""
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    template: str = QwenImagePipeline(**parts).prompt_template_encode
    return template


def qwen_text(width: int, layers: int) -> dict[str, Any]:
    """Settings of a language model of `width`."""
    heads = width // 128
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128}


def flux(device: str, layers: int | None) -> FluxPipeline:
    depth = {} if layers is None else {"num_layers": layers, "num_single_layers": layers}
    t5, t5_words = t5_text()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=random_model(lambda: AutoencoderKL(**kl_autoencoder(0.3611, 0.1159)), device),
        text_encoder=clip_text(CLIPTextModel, 768, 12, device),
        tokenizer=clip_words(),
        text_encoder_2=t5,
        tokenizer_2=t5_words,
        transformer=random_model(lambda: FluxTransformer2DModel(**FLUX | depth), device),
    )


def sd3(device: str, layers: int | None, architecture: dict[str, Any] = SD3) -> StableDiffusion3Pipeline:
    depth = {} if layers is None else {"num_layers": layers}
    t5, t5_words = t5_text()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=random_model(lambda: AutoencoderKL(**kl_autoencoder(1.5305, 0.0609)), device),
        text_encoder=clip_text(CLIPTextModelWithProjection, 768, 12, device),
        tokenizer=clip_words(),
        text_encoder_2=clip_text(CLIPTextModelWithProjection, 1280, 20, device),
        tokenizer_2=clip_words(),
        text_encoder_3=t5,
        tokenizer_3=t5_words,
        transformer=random_model(lambda: SD3Transformer2DModel(**architecture | depth), device),
    )


def sd3_medium(device: str, layers: int | None) -> StableDiffusion3Pipeline:
    return sd3(device, layers, SD3_MEDIUM)


def sana(device: str, layers: int | None) -> SanaPipeline:
    depth = {} if layers is None else {"num_layers": layers}
    gemma, gemma_words = gemma_text()
    return SanaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=random_model(lambda: AutoencoderDC(**DC_AE), device),
        text_encoder=gemma,
        tokenizer=gemma_words,
        transformer=random_model(lambda: SanaTransformer2DModel(**SANA | depth), device),
    )


def qwen_image(device: str, layers: int | None) -> QwenImagePipeline:
    depth = {} if layers is None else {"num_layers": layers}
    tokenizer = qwen_words(qwen_image_template())
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = qwen_text(3584, 1) | {"vocab_size": len(tokenizer), "rope_parameters": rope}
    eyes = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 3584}
    settings = Qwen2_5_VLConfig(text_config=text, vision_config=eyes)
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=random_model(lambda: AutoencoderKLQwenImage(**QWEN_IMAGE_VAE), device),
        text_encoder=Qwen2_5_VLForConditionalGeneration(settings).to(torch.bfloat16),
        tokenizer=tokenizer,
        transformer=random_model(lambda: QwenImageTransformer2DModel(**QWEN_IMAGE | depth), device),
    )


def z_image(device: str, layers: int | None) -> ZImagePipeline:
    depth = {} if layers is None else {"n_layers": layers}
    tokenizer = qwen_words(CHAT)
    settings = Qwen3Config(vocab_size=len(tokenizer), **qwen_text(2560, 2))  # the pipeline takes the last but one
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=random_model(lambda: AutoencoderKL(**kl_autoencoder(0.3611, 0.1159)), device),
        text_encoder=Qwen3ForCausalLM(settings).to(torch.bfloat16),
        tokenizer=tokenizer,
        transformer=random_model(lambda: ZImageTransformer2DModel(**Z_IMAGE | depth), device),
    )


TRANSFORMERS = {
    "flux": (FluxTransformer2DModel, FLUX, kl_autoencoder(0.3611, 0.1159)),
    "sd3": (SD3Transformer2DModel, SD3, kl_autoencoder(1.5305, 0.0609)),
    "sd3_medium": (SD3Transformer2DModel, SD3_MEDIUM, kl_autoencoder(1.5305, 0.0609)),
    "sana": (SanaTransformer2DModel, SANA, DC_AE),
    "qwen_image": (QwenImageTransformer2DModel, QWEN_IMAGE, QWEN_IMAGE_VAE),
    "z_image": (ZImageTransformer2DModel, Z_IMAGE, kl_autoencoder(0.3611, 0.1159)),
}
"""Model → class and settings of its transformer, settings of its autoencoder."""
WIDTHS = {
    "flux": 4096,
    "sd3": 4096,
    "sd3_medium": 4096,
    "sana": 2304,
    "qwen_image": 3584,
    "z_image": 2560,
    "flux2_klein": 7680,
}
"""Model → channels of a text token."""
PIPELINES = {
    "flux": flux,
    "sd3": sd3,
    "sd3_medium": sd3_medium,
    "sana": sana,
    "qwen_image": qwen_image,
    "z_image": z_image,
}


def transformer_only(config: Model, device: str, layers: int | None = None) -> DiffusionModel:
    """The model of a family without a checkpoint: its transformer with random weights, and nothing else.

    Args:
        layers: blocks of each kind instead of the published number.
    """
    kind, settings, autoencoder = TRANSFORMERS[config.family]
    if layers is not None:
        depths = ("num_layers", "num_single_layers", "n_layers")
        settings = settings | {key: layers for key in depths if key in settings}
    transformer = random_model(lambda: kind(**settings), device)
    own, adapted = models.family(config), dict(transformer.config)
    made: dict[Any, torch.nn.Module] = {"transformer": own.adapt_(transformer)}
    return own(config, device, made, transformer_config=adapted, vae_config=autoencoder)


def random_embeddings(config: Model, count: int, *, words: int = 40) -> list[PromptEmbedding]:
    """Prompt embeddings of the published shapes, standard normal; where text is masked, all but `words` tokens are."""
    generator = torch.Generator().manual_seed(1)
    tokens, width = config.max_sequence_length, WIDTHS[config.family]
    tokens += CLIP_LENGTH if config.family == "sd3" else 0
    pooled = {"flux": 768, "sd3": 2048}.get(config.family)
    mask = "prompt_attention_mask" if config.family == "sana" else "prompt_embeds_mask"
    made = []
    for i in range(count):
        tensors = {"prompt_embeds": torch.randn(tokens, width, generator=generator)}
        if pooled:
            tensors["pooled_prompt_embeds"] = torch.randn(pooled, generator=generator)
        else:
            tensors[mask] = (torch.arange(tokens) < words).float()
        made.append(PromptEmbedding(prompt_id=str(i), tensors=tensors, digest=str(i)))
    return made


def write_clip(folder: Path) -> None:
    """CLIP ViT-L/14 with the testbed's words."""
    tokenizer = clip_words()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": CLIP_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    }
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=(*PIPELINES, "clip"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="transformer blocks (of each kind) instead of the published number")
    arguments = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # so that digests of runs on two machines can be compared
    if arguments.model == "clip":
        write_clip(arguments.out)
    else:
        pipeline = PIPELINES[arguments.model](device, arguments.layers)
        parameters = sum(p.numel() for p in pipeline.transformer.parameters())
        pipeline.save_pretrained(arguments.out, max_shard_size="10GB")
        print(f"{arguments.model}: transformer of {parameters / 1e9:.2f} B parameters")
    print(f"written to {arguments.out} in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
