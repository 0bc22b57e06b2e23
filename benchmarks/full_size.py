"""Writes checkpoints of the published architectures with random weights, for benchmarks without downloads.

    python benchmarks/full_size.py flux OUT        # FLUX.1-dev, 34 GB: transformer 24, T5-XXL 9.5
    python benchmarks/full_size.py flux_kontext OUT    # FLUX.1-Kontext-dev, 34 GB: the networks of FLUX.1-dev
    python benchmarks/full_size.py sd3 OUT         # SD3.5-Large, 28 GB: transformer 16, T5-XXL 9.5, OpenCLIP bigG 1.4
    python benchmarks/full_size.py sd3_medium OUT  # SD3.5-Medium, 16 GB: transformer 5
    python benchmarks/full_size.py sana OUT        # SANA 1.6B at 1024 px, 10 GB: Gemma-2-2B 5.2, transformer 3.2
    python benchmarks/full_size.py qwen_image OUT  # Qwen-Image, 58 GB: transformer 41, Qwen2.5-VL-7B 17
    python benchmarks/full_size.py qwen_image_edit OUT # Qwen-Image-Edit, 58 GB: the networks of Qwen-Image
    python benchmarks/full_size.py z_image OUT     # Z-Image, 21 GB: transformer 12, Qwen3-4B 8
    python benchmarks/full_size.py wan OUT         # Wan 2.1 T2V 1.3B, 14 GB: UMT5-XXL 11, transformer 2.8
    python benchmarks/full_size.py wan22 OUT       # Wan 2.2 TI2V 5B, 23 GB; wan_14b: Wan 2.1 T2V 14B, 40 GB
    python benchmarks/full_size.py clip OUT        # CLIP ViT-L/14, the network of CLIPScore, 1.7 GB
    python benchmarks/full_size.py pickscore OUT   # CLIP ViT-H/14, the network of PickScore and HPSv2, 3.9 GB

OUT becomes a diffusers pipeline folder (for a reward network, a transformers folder) that our loaders read. All
networks have the published sizes, dtypes and shards. Tokenizers have the published classes and vocabulary sizes, and
know the testbed's words. Times and memory do not depend on the weights' values; rewards and rankings do, so they are
meaningless here. `--layers N` reduces the depth of the transformer and of the text encoders, `--text-layers N` that of
the text encoders; `--tiny` makes everything small, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import architectures as published
import diffusers
import torch
import transformers
from random_weights import random_model, write
from torch import nn

from solrl_ray import models
from solrl_ray.config.schema import Model
from solrl_ray.models.base import DiffusionModel
from solrl_ray.models.shapes import shipped
from solrl_ray.records import REFERENCE_TOKENS, PromptEmbedding
from solrl_ray.testbed import world

CLIP_LENGTH = 77
T5_LENGTH = 512
GEMMA_LENGTH = 300
QWEN_LENGTH = 2048
CLIP_TOKENS, T5_TOKENS, UMT5_TOKENS, GEMMA_TOKENS, QWEN_TOKENS = 49408, 32100, 256300, 256000, 151643
"""Vocabulary sizes of the published tokenizers; Qwen's without the added tokens for chats."""
T5 = (transformers.T5EncoderModel, published.T5_XXL, T5_TOKENS)
DEPTHS = ("num_layers", "num_single_layers", "n_layers")
"""Keys of a transformer's depth in its settings."""
CHAT = (
    "{% for message in messages %}<|im_start|>user\n{{ message.content }}<|im_end|>\n<|im_start|>assistant\n"
    "{% endfor %}"
)
VISION = {
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
}
"""Token → setting of Qwen2.5-VL with its id."""
TEMPLATE_WORD = re.compile(r"<\|\w+\|>| ?[A-Za-z]+|[^\w ]")
"""Pieces of the prompt templates for which Qwen's tokenizer has one token each."""


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes that are smaller than published."""

    layers: int | None = None
    """Transformer blocks of each kind; None: as published."""
    text_layers: int | None = None
    """Layers of each text encoder, at least 2, because some pipelines use the last but one."""
    tiny: bool = False

    def network(self, kind: Any, settings: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
        """A network of class `kind` on the meta device, in the dtype of its files."""
        settings = {**settings, **(published.TINY[kind.__name__] if self.tiny else {})}
        if issubclass(kind, transformers.PreTrainedModel):
            config = kind.config_class(**settings)
            if self.text_layers is not None:
                _cut(config.get_text_config(), max(2, self.text_layers))
            made = lambda: kind(config)  # noqa: E731
        else:
            depths = {key: self.layers for key in DEPTHS if key in settings and self.layers is not None}
            made = lambda: kind(**settings | depths)  # noqa: E731
        with torch.device("meta"):
            network: nn.Module = made()
        return nn.Module.to(network, dtype).eval()  # its own .to would warn about layers that it keeps in float32

    def tokens(self, published: int) -> int:
        """Minimum vocabulary size of a tokenizer."""
        return 0 if self.tiny else published


def _cut(config: Any, layers: int) -> None:
    """Change the depth in a text encoder's settings."""
    if hasattr(config, "layer_types"):  # first, because num_hidden_layers is validated against it
        config.layer_types = config.layer_types[:layers]
    config.num_hidden_layers = layers


def filled(pieces: Mapping[str, int], size: int) -> dict[str, int]:
    """The vocabulary, filled up to `size` with pieces that occur in no text."""
    return {**pieces, **{f"<unused{i}>": i for i in range(len(pieces), size)}}


def tokenizer_model(name: str) -> dict[str, Any]:
    """Vocabulary and merges of the testbed's tokenizer `name`."""
    file = Path(world.__file__).parent / "assets" / "pipeline" / name / "tokenizer.json"
    content: dict[str, Any] = json.loads(file.read_text())["model"]
    return content


def clip_words(size: Size) -> Any:
    model = tokenizer_model("tokenizer")
    merges = [tuple(pair) for pair in model["merges"]]
    vocabulary = filled(model["vocab"], size.tokens(CLIP_TOKENS))
    return transformers.CLIPTokenizerFast(vocab=vocabulary, merges=merges, model_max_length=CLIP_LENGTH)


def clip_settings(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Settings of a CLIP text encoder that pools at this tokenizer's end token."""
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**settings, **special}


def clip_text(kind: Any, settings: Mapping[str, Any], size: Size, dtype: torch.dtype) -> tuple[Any, Any]:
    tokenizer = clip_words(size)
    return size.network(kind, clip_settings(settings, tokenizer), dtype), tokenizer


def t5_text(size: Size, dtype: torch.dtype, of: tuple[Any, dict[str, Any], int] = T5) -> tuple[Any, Any]:
    kind, settings, tokens = of
    pieces = [(piece, score) for piece, score in tokenizer_model("tokenizer_2")["vocab"]]
    pieces += [(f"<unused{i}>", -100.0) for i in range(len(pieces), size.tokens(tokens))]
    tokenizer = transformers.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)
    return size.network(kind, settings, dtype), tokenizer


def gemma_text(size: Size) -> tuple[Any, Any]:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4, "▁": 5}
    for letter in sorted("abcdefghijklmnopqrstuvwxyz0123456789,.-'"):
        vocabulary.setdefault(letter, len(vocabulary))
    vocabulary = filled(vocabulary, size.tokens(GEMMA_TOKENS))
    tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=GEMMA_LENGTH)
    tokenizer.padding_side = "right"
    return size.network(transformers.Gemma2Model, published.GEMMA_2_2B), tokenizer


def qwen_words(template: str, size: int = 0) -> Any:
    """A byte-level BPE without merges: one token per character, but one per word of `template`. So a pipeline that
    removes the template by its number of tokens cuts at the right place.

    Args:
        size: minimum vocabulary size.
    """
    pieces = ["<|endoftext|>", "Ġ", "Ċ", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary = filled({piece: i for i, piece in enumerate(pieces)}, size)
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[], model_max_length=QWEN_LENGTH, chat_template=CHAT
    )
    tokenizer.add_tokens(sorted(word for word in set(TEMPLATE_WORD.findall(template)) if len(word) > 1))
    return tokenizer


def qwen_image_template(kind: Any = diffusers.QwenImagePipeline) -> str:
    """The pipeline's template around a prompt, including the placeholder tokens of images."""
    template: str = kind(**dict.fromkeys(signature(kind).parameters)).prompt_template_encode
    return template + "".join(VISION) * (kind is diffusers.QwenImageEditPlusPipeline)


def qwen_processor(tokenizer: Any, **pixels: int) -> Any:
    """The processor that prepares images for Qwen2.5-VL.

    Args:
        pixels: ``min_pixels`` and ``max_pixels`` of an image; default: as published.
    """
    images = transformers.Qwen2VLImageProcessor(patch_size=14, **{"min_pixels": 56**2, "max_pixels": 3584**2} | pixels)
    return transformers.Qwen2VLProcessor(images, tokenizer, transformers.Qwen2VLVideoProcessor(patch_size=14))


def vision_tokens(tokenizer: Any) -> dict[str, int]:
    """Settings of Qwen2.5-VL: ids of the image tokens."""
    return {key: tokenizer.convert_tokens_to_ids(word) for word, key in VISION.items()}


def flux_texts(size: Size) -> list[tuple[Any, Any]]:
    dtype = torch.bfloat16
    return [clip_text(transformers.CLIPTextModel, published.CLIP_L, size, dtype), t5_text(size, dtype)]


def sd3_texts(size: Size) -> list[tuple[Any, Any]]:
    kind, dtype = transformers.CLIPTextModelWithProjection, torch.float16
    return [
        *(clip_text(kind, of, size, dtype) for of in (published.CLIP_L, published.CLIP_BIG_G)),
        t5_text(size, dtype),
    ]


def wan_texts(size: Size) -> list[tuple[Any, Any]]:
    return [t5_text(size, torch.bfloat16, (transformers.UMT5EncoderModel, published.UMT5_XXL, UMT5_TOKENS))]


def qwen_image_texts(size: Size, kind: Any = diffusers.QwenImagePipeline) -> list[tuple[Any, Any]]:
    tokenizer = qwen_words(qwen_image_template(kind), size.tokens(QWEN_TOKENS))
    pictures = vision_tokens(tokenizer) if kind is diffusers.QwenImageEditPlusPipeline else {}
    settings = published.QWEN_2_5_VL_7B | pictures
    return [(size.network(transformers.Qwen2_5_VLForConditionalGeneration, settings), tokenizer)]


def z_image_texts(size: Size) -> list[tuple[Any, Any]]:
    return [
        (size.network(transformers.Qwen3ForCausalLM, published.QWEN_3_4B), qwen_words(CHAT, size.tokens(QWEN_TOKENS)))
    ]


TRANSFORMERS = {
    "flux": (diffusers.FluxTransformer2DModel, published.FLUX, published.kl_autoencoder(0.3611, 0.1159)),
    "flux_kontext": (diffusers.FluxTransformer2DModel, published.FLUX, published.kl_autoencoder(0.3611, 0.1159)),
    "sd3": (diffusers.SD3Transformer2DModel, published.SD3, published.kl_autoencoder(1.5305, 0.0609)),
    "sd3_medium": (diffusers.SD3Transformer2DModel, published.SD3_MEDIUM, published.kl_autoencoder(1.5305, 0.0609)),
    "sana": (diffusers.SanaTransformer2DModel, published.SANA, published.DC_AE),
    "sana_video": (diffusers.SanaVideoTransformer3DModel, published.SANA_VIDEO, published.WAN_VAE),
    "qwen_image": (diffusers.QwenImageTransformer2DModel, published.QWEN_IMAGE, published.QWEN_IMAGE_VAE),
    "qwen_image_edit": (diffusers.QwenImageTransformer2DModel, published.QWEN_IMAGE, published.QWEN_IMAGE_VAE),
    "wan": (diffusers.WanTransformer3DModel, published.WAN_1_3B, published.WAN_VAE),
    "wan_14b": (diffusers.WanTransformer3DModel, published.WAN_14B, published.WAN_VAE),
    "wan22": (diffusers.WanTransformer3DModel, published.WAN22_5B, published.WAN22_VAE),
    "z_image": (diffusers.ZImageTransformer2DModel, published.Z_IMAGE, published.kl_autoencoder(0.3611, 0.1159)),
}
"""Model → transformer class, transformer settings, autoencoder settings."""
DECODERS = {
    "sana": diffusers.AutoencoderDC,
    **dict.fromkeys(("qwen_image", "qwen_image_edit"), diffusers.AutoencoderKLQwenImage),
}
DECODERS |= dict.fromkeys(("sana_video", "wan", "wan_14b", "wan22"), diffusers.AutoencoderKLWan)
"""Model → autoencoder class; all others use `AutoencoderKL`."""
FLUX_SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True}
QWEN_SCHEDULER = {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
REST: dict[str, tuple[Any, dict[str, Any], Callable[[Size], list[tuple[Any, Any]]]]] = {
    "flux": (diffusers.FluxPipeline, FLUX_SCHEDULER, flux_texts),
    "flux_kontext": (diffusers.FluxKontextPipeline, FLUX_SCHEDULER, flux_texts),
    "sd3": (diffusers.StableDiffusion3Pipeline, {"shift": 3.0}, sd3_texts),
    "sd3_medium": (diffusers.StableDiffusion3Pipeline, {"shift": 3.0}, sd3_texts),
    "sana": (diffusers.SanaPipeline, {"shift": 3.0}, lambda size: [gemma_text(size)]),
    "sana_video": (diffusers.SanaVideoPipeline, {"shift": 8.0}, lambda size: [gemma_text(size)]),
    "qwen_image": (diffusers.QwenImagePipeline, QWEN_SCHEDULER, qwen_image_texts),
    "qwen_image_edit": (
        diffusers.QwenImageEditPlusPipeline,
        QWEN_SCHEDULER,
        partial(qwen_image_texts, kind=diffusers.QwenImageEditPlusPipeline),
    ),
    "wan": (diffusers.WanPipeline, {"shift": 3.0}, wan_texts),
    "wan_14b": (diffusers.WanPipeline, {"shift": 3.0}, wan_texts),
    "wan22": (partial(diffusers.WanPipeline, expand_timesteps=True), {"shift": 5.0}, wan_texts),
    "z_image": (diffusers.ZImagePipeline, {"shift": 6.0}, z_image_texts),
}
"""Model → pipeline class, scheduler settings, text encoders with tokenizers."""


def pipeline(name: str, size: Size) -> Any:
    """A pipeline whose networks are on the meta device."""
    transformer, settings, autoencoder = TRANSFORMERS[name]
    kind, scheduler, texts = REST[name]
    decoder_dtype = torch.float32 if name == "sana" else torch.bfloat16
    parts: dict[str, Any] = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**scheduler),
        "vae": size.network(DECODERS.get(name, diffusers.AutoencoderKL), autoencoder, decoder_dtype),
        "transformer": size.network(transformer, settings),
    }
    for end, (encoder, tokenizer) in zip(("", "_2", "_3"), texts(size), strict=False):
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": tokenizer}
    if kind is diffusers.QwenImageEditPlusPipeline:
        parts["processor"] = qwen_processor(parts["tokenizer"])
    return kind(**parts)


PIPELINES: dict[str, Callable[[Size], Any]] = {name: partial(pipeline, name) for name in REST}
WIDTHS = {"flux": 4096, "sd3": 4096, "sana": 2304, "qwen_image": 3584, "z_image": 2560, "flux2_klein": 7680}
WIDTHS |= {"sana_video": 2304, "wan": 4096, "flux_kontext": 4096, "qwen_image_edit": 3584}
"""Family → channels per text token."""


def transformer_only(name: str, config: Model, device: str, layers: int | None = None) -> DiffusionModel:
    """A model without a checkpoint: only its transformer, with random weights.

    Args:
        name: key of `TRANSFORMERS`, as a family has models of several sizes.
        layers: blocks of each kind instead of the published number.
    """
    kind, settings, autoencoder = TRANSFORMERS[name]
    if layers is not None:
        settings = settings | {key: layers for key in DEPTHS if key in settings}
    transformer = random_model(lambda: kind(**settings), device)
    own, adapted = models.family(config), dict(transformer.config)
    made: dict[Any, torch.nn.Module] = {"transformer": own.adapt_(transformer)}
    return own(config, device, made, transformer_config=adapted, vae_config=autoencoder)


def reference_tokens(config: Model) -> tuple[int, int]:
    """Number of tokens of all reference images of a prompt, and channels per token, for a shipped model."""
    known = shipped(config)
    assert known is not None
    tokens, channels = models.family(config).SIZES.latent_shape(config.shapes[0], known.transformer, known.factor)
    return config.references * tokens, channels


def random_embeddings(config: Model, count: int, *, words: int = 40) -> list[PromptEmbedding]:
    """Standard normal prompt embeddings with a shipped model's shapes, including tokens of `model.references`. For
    families that mask text, all but `words` tokens are masked.
    """
    generator = torch.Generator().manual_seed(1)
    tokens, width = config.max_sequence_length, WIDTHS[config.family]
    tokens += CLIP_LENGTH if config.family == "sd3" else 0
    pooled = {"flux": 768, "flux_kontext": 768, "sd3": 2048}.get(config.family)
    mask = "prompt_attention_mask" if config.family in ("sana", "sana_video") else "prompt_embeds_mask"
    made = []
    for i in range(count):
        tensors = {"prompt_embeds": torch.randn(tokens, width, generator=generator)}
        if pooled:
            tensors["pooled_prompt_embeds"] = torch.randn(pooled, generator=generator)
        else:
            tensors[mask] = (torch.arange(tokens) < words).float()
        if config.references:
            tensors[REFERENCE_TOKENS] = torch.randn(*reference_tokens(config), generator=generator)
        made.append(PromptEmbedding(prompt_id=str(i), tensors=tensors, digest=str(i)))
    # The first one is also the negative prompt.
    return [each.against(made[0]) for each in made] if config.cfg.is_on else made


REWARDS = {"clip": (published.CLIP_L, published.VISION_L), "pickscore": (published.CLIP_H, published.VISION_H)}
"""Reward network → settings of its text encoder and vision tower."""


def write_pipeline(pipeline: Any, folder: Path) -> int:
    """Write a pipeline whose networks are on the meta device; returns the bytes of their weights."""
    folder.mkdir(parents=True, exist_ok=True)
    pipeline.save_config(folder)
    parts = {folder / name: part for name, part in pipeline.components.items() if part is not None}
    for place, part in parts.items():
        if not isinstance(part, nn.Module):
            part.save_pretrained(place)
    return write({place: part for place, part in parts.items() if isinstance(part, nn.Module)})


def reward_network(name: str, size: Size) -> tuple[nn.Module, Any]:
    """A `CLIPModel` on the meta device in float32, and its tokenizer."""
    tokenizer = clip_words(size)
    text, vision = REWARDS[name]
    width = text["projection_dim"]
    if size.tiny:
        small = published.TINY["CLIPTextModel"]
        text, vision, width = text | small, vision | small, small["projection_dim"]
    config = transformers.CLIPConfig(
        text_config=clip_settings(text, tokenizer),
        vision_config=vision | {"projection_dim": width},
        projection_dim=width,
    )
    with torch.device("meta"):
        return transformers.CLIPModel(config).eval(), tokenizer


def write_reward(name: str, folder: Path, size: Size) -> int:
    """Write a reward network with tokenizer and image processor; returns the bytes of its weights."""
    network, tokenizer = reward_network(name, size)
    tokenizer.save_pretrained(folder)
    transformers.CLIPImageProcessor().save_pretrained(folder)
    return write({folder: network})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=(*PIPELINES, *REWARDS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="transformer blocks (of each kind) instead of the published number")
    parser.add_argument("--text-layers", type=int, help="layers of each text encoder, at least 2; default: as --layers")
    parser.add_argument("--tiny", action="store_true", help="the same classes, a few thousand weights each")
    arguments = parser.parse_args()
    began = time.perf_counter()
    text_layers = arguments.text_layers or arguments.layers
    size = Size(layers=arguments.layers, text_layers=text_layers, tiny=arguments.tiny)
    if arguments.model in REWARDS:
        written = write_reward(arguments.model, arguments.out, size)
    else:
        pipeline = PIPELINES[arguments.model](size)
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module):
                print(f"{name}: {sum(p.numel() for p in part.parameters()) / 1e9:.3f} B parameters")
        written = write_pipeline(pipeline, arguments.out)
    print(f"{written / 1e9:.1f} GB written to {arguments.out} in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
