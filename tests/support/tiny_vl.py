"""Very small reward checkpoints on Qwen's vision-language models, in exactly the layout of the published ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from full_size import qwen_words
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

SPECIAL = "<|im_start|><|im_end|><|vision_start|><|vision_end|><|image_pad|><|video_pad|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = ("Alignment Score (1-5): 2.5\n", "Coherence Score (1-5): 4\n", "Style Score (1-5): 1.75")
"""Tokens of the tiny tokenizers."""
WIDTH, PATCH, HEADS = 32, 14, 2


def processor_of(folder: Path, processor_class: Any = Qwen2VLProcessor, patch: int = PATCH) -> Any:
    """Write a processor, and return it."""
    tokenizer = qwen_words(SPECIAL)
    tokenizer.add_tokens(list(ANSWER))
    images = {"patch_size": patch, "min_pixels": 4 * (2 * patch) ** 2, "max_pixels": 12 * (2 * patch) ** 2}
    processor = processor_class(
        Qwen2VLImageProcessor(**images), tokenizer, Qwen2VLVideoProcessor(patch_size=patch), chat_template=CHAT
    )
    processor.save_pretrained(folder)
    return processor


def _sizes(tokenizer: Any, vision: dict[str, Any]) -> dict[str, Any]:
    tokens = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    starts = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    text = {
        "vocab_size": len(tokenizer) + 5,  # as published: padded
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": WIDTH // HEADS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
    }
    named = {"image_token_id": tokens["image_pad"], "video_token_id": tokens["video_pad"]}
    named |= {f"{name}_token_id": token for name, token in starts.items()}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **named}


def build_hpsv3(folder: Path, base: Path) -> tuple[Qwen2VLForConditionalGeneration, nn.Sequential, Any]:
    """Write ``HPSv3.safetensors`` to `folder` and a Qwen2-VL checkpoint without weights to `base`.

    Returns network, head and processor, the latter with the added token.
    """
    model, processor = _qwen2_vl(base, ["<|Reward|>"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        head = nn.Sequential(
            nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        )
    weights = {name: tensor.clone() for name, tensor in _before_4_52(model.state_dict()).items()}
    weights |= {f"rm_head.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "HPSv3.safetensors")
    return model, head, processor


def _qwen2_vl(base: Path, tokens: list[str]) -> tuple[Qwen2VLForConditionalGeneration, Any]:
    """Write processor and sizes; returns a network for it and the processor, both with `tokens` added."""
    processor = processor_of(base)
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    sizes = Qwen2VLConfig(**_sizes(processor.tokenizer, vision))
    sizes.save_pretrained(base)
    processor.tokenizer.add_tokens(tokens, special_tokens=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        model = Qwen2VLForConditionalGeneration(sizes).eval()
        model.resize_token_embeddings(len(processor.tokenizer))
    for parameter in model.parameters():
        parameter.data.mul_(4)  # away from the tiny initial weights, so that pictures and positions matter
    return model, processor


def _before_4_52(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names that transformers gave before that version."""
    names = {r"model\.visual\.": "visual.", r"model\.language_model\.": "model."}
    found = {}
    for name, tensor in state.items():
        for pattern, old in names.items():
            name = re.sub(pattern, old, name, count=1)
        found[name] = tensor
    return found


def build_videoreward(folder: Path, base: Path, *, outputs: int = 1) -> tuple[Any, Any]:
    """Write VideoReward's checkpoint to `folder`, and a Qwen2-VL checkpoint without weights to `base`.

    Returns the PEFT model with the head as its `rm_head`, and the processor with the added tokens.
    """
    model, processor = _qwen2_vl(base, ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"])
    model.rm_head = nn.Linear(WIDTH, outputs, bias=False)
    lora = {"lora_alpha": 6, "use_rslora": True}
    config = LoraConfig(
        r=2, init_lora_weights=False, target_modules=r".*language_model.*(q_proj|down_proj|embed_tokens)", **lora
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model.rm_head.reset_parameters()
        config.modules_to_save = ["rm_head"]
        model = get_peft_model(model, config).eval()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.3)
    (folder / "checkpoint-200").mkdir(parents=True)
    (folder / "checkpoint-9").mkdir()
    torch.save({}, folder / "checkpoint-9" / "model.pth")
    torch.save(_before_4_52(model.state_dict()), folder / "checkpoint-200" / "model.pth")
    scale = {"VQ_mean": 3.0, "VQ_std": 2.0, "MQ_mean": 1.0, "MQ_std": 0.5, "TA_mean": -2.0, "TA_std": 4.0}
    settings = {"data_config": {"max_frame_pixels": 200704}, "peft_lora_config": lora, "inference_config": scale}
    (folder / "model_config.json").write_text(json.dumps(settings))
    return model, processor


def build_unifiedreward(folder: Path, kind: str) -> Any:
    """Write a UnifiedReward checkpoint of ``model_type`` `kind`, which always answers `ANSWER`; returns its processor.

    Its blocks pass their input on, and each token's embedding points to the token that follows it.
    """
    three = kind == "qwen3_vl"
    processor = processor_of(folder, Qwen3VLProcessor if three else Qwen2_5_VLProcessor, 16 if three else PATCH)
    tokenizer = processor.tokenizer
    vision: dict[str, Any] = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    vision = vision if three else {"fullatt_block_indexes": [0]}
    vision |= {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    config_class = Qwen3VLConfig if three else Qwen2_5_VLConfig
    model_class = Qwen3VLForConditionalGeneration if three else Qwen2_5_VLForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = model_class(config_class(**_sizes(tokenizer, vision)))
    follows = [tokenizer.encode("\n")[0], *(tokenizer.encode(text)[0] for text in ANSWER)]
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        for block in model.model.language_model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for place, (token, following) in enumerate(zip(follows, [*follows[1:], ends], strict=True)):
            model.model.language_model.embed_tokens.weight[token] = torch.eye(WIDTH)[place]
            model.lm_head.weight[following, place] = 1
    model.generation_config.update(eos_token_id=ends, pad_token_id=0, do_sample=True, temperature=0.1)  # as published
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind
    return processor
