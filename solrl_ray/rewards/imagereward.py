"""ImageReward (Xu et al. 2023, arXiv 2304.05977): BLIP encodes the prompt with cross-attention to the image.

The published code does not run with current libraries. So its network is rebuilt from transformers' BLIP, and the keys
of the checkpoint `ImageReward.pt` are renamed. `make parity` compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints
from solrl_ray.rewards.aesthetic import ScoreHead
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import Preprocessing
from solrl_ray.rewards.texts import Texts

FILE = "ImageReward.pt"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the network's raw output on the authors' data; they normalise the published score."""
MAX_TOKENS = 35
HEAD_WIDTH = 64
"""Features of an attention head, in both towers: the only size that does not follow from the checkpoint's shapes."""
_VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")
"""Weights of BLIP's pre-training, not needed for the reward."""


class ImageReward(CheckpointReward):
    """(head(text tower's first token) - MEAN) / STD, about -2.3 to 2.0, in float32.

    One forward scores each image with its prompt; the published `inference_rank` scores every image with every prompt.
    `path` holds the checkpoint, `base` the BERT tokenizer. Images are rounded to 8 bits and resized as in Pillow. The
    text tower attends to the image, so only the tokens of a prompt can be cached.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, base = self.folders(config, keys)
        weights = checkpoints.read_torch(folder, FILE, keys("path"))
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(_UNUSED)}
        try:
            vision, text, head = build(weights)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            missing = f"{FILE} is not ImageReward's: {type(error).__name__} {error}"
            raise UserError(f"{keys('path')} is {config.path!r}, but {missing}.") from error
        checkpoints.fill(vision, vision_weights(weights), folder, FILE, keys("path"))
        checkpoints.fill(text, checkpoints.under(weights, "blip.text_encoder."), folder, FILE, keys("path"))
        checkpoints.fill(head, checkpoints.under(weights, "mlp."), folder, FILE, keys("path"))
        self._vision, self._text, self._head = (self._frozen(part) for part in (vision, text, head))
        self._tokenizer = load_tokenizer(base, keys("base"))
        size: int = vision.config.image_size
        self._preprocessing = Preprocessing.torchvision(size, interpolation="bicubic", eight_bit=True)
        self._tokens = Texts(name, self._tokenize, self._count_tokens, MAX_TOKENS)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, Path]:
        """Folders of the checkpoint and of the tokenizer."""
        folder = checkpoints.folder(config.path, [(FILE,)], keys("path"))
        return folder, checkpoints.folder(config.base, [checkpoints.BERT_TOKENIZER], keys("base"))

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens, mask = self._tokens(prompts).unbind(dim=1)
        pixels = self._preprocessing(images.to(self._device, torch.float32))
        seen = self._vision(pixel_values=pixels).last_hidden_state
        read = self._text(
            input_ids=tokens,
            attention_mask=mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            is_decoder=False,
        ).last_hidden_state
        scores: Tensor = self._head(read[:, 0])
        return (scores - MEAN) / STD

    def _count_tokens(self, prompt: str) -> int:
        return len(self._tokenizer(prompt, verbose=False).input_ids)

    def _tokenize(self, prompt: str) -> Tensor:
        """Token ids and attention mask, int64 [2, MAX_TOKENS]."""
        encoded = self._tokenizer(
            prompt, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        return torch.cat([encoded.input_ids, encoded.attention_mask]).to(self._device)


def load_tokenizer(base: Path, key: str) -> BertTokenizer:
    """BERT's tokenizer with the two tokens that BLIP adds. Raises UserError naming `key` if it cannot be read."""
    tokenizer: BertTokenizer = paths.load_tokenizer(BertTokenizer, base, key)
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    return tokenizer


def build(weights: Mapping[str, Tensor]) -> tuple[BlipVisionModel, BlipTextModel, ScoreHead]:
    """Build the network with the sizes of a checkpoint, without loading its weights.

    Raises KeyError or ValueError if it is not a checkpoint of ImageReward.
    """
    unknown = [name for name in weights if not name.startswith(("blip.visual_encoder.", "blip.text_encoder.", "mlp."))]
    if unknown:
        raise ValueError(f"it has the unknown weight {unknown[0]!r}")
    vision = checkpoints.under(weights, "blip.visual_encoder.")
    patch = vision["patch_embed.proj.weight"].shape
    tokens = vision["pos_embed"].shape[1] - 1
    vision_config = BlipVisionConfig(
        hidden_size=patch[0],
        intermediate_size=vision["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(vision, r"^blocks\.(\d+)\."),
        num_attention_heads=patch[0] // HEAD_WIDTH,
        image_size=round(tokens**0.5) * patch[-1],
        patch_size=patch[-1],
        layer_norm_eps=1e-6,
    )
    text = checkpoints.under(weights, "blip.text_encoder.")
    words = text["embeddings.word_embeddings.weight"].shape
    text_config = BlipTextConfig(
        vocab_size=words[0],
        hidden_size=words[1],
        encoder_hidden_size=patch[0],
        intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(text, r"^encoder\.layer\.(\d+)\."),
        num_attention_heads=words[1] // HEAD_WIDTH,
        max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
        is_decoder=True,  # otherwise there is no cross-attention
    )
    return BlipVisionModel(vision_config), BlipTextModel(text_config, add_pooling_layer=False), ScoreHead(words[1])


def vision_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The image tower's weights, renamed to transformers' names."""
    renamed = {}
    for name, tensor in checkpoints.under(weights, "blip.visual_encoder.").items():
        new = name
        for pattern, replacement in _VISION:
            new = re.sub(pattern, replacement, new)
        renamed[new] = tensor
    return renamed


def _layers(weights: Mapping[str, Tensor], pattern: str) -> int:
    return 1 + max(int(match.group(1)) for name in weights if (match := re.match(pattern, name)))
