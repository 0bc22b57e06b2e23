"""Very small reward checkpoints in exactly the layout of the published ones, and what the published way makes of them.

ImageReward's towers are written by the libraries that its authors' code was adapted from (timm's vision transformer,
BERT), so names and arithmetic come from elsewhere than from the code that reads them. They are imported where they are
used: that takes seconds, which every process that collects tests would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer

from solrl_ray.rewards.aesthetic import FILE as AESTHETIC_FILE
from solrl_ray.rewards.imagereward import FILE as IMAGEREWARD_FILE

if TYPE_CHECKING:
    import open_clip
    from timm.models.vision_transformer import VisionTransformer

HPS_ARCHITECTURE = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
WIDTH = 128
"""Of both ImageReward towers: two heads of 64."""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "square", "circles", "two", "[DEC]", "[ENC]"]


def published_head(features: int) -> nn.Sequential:
    """The linear layers at the places where the published files have them."""
    return nn.Sequential(
        nn.Linear(features, 1024),
        nn.Identity(),
        nn.Linear(1024, 128),
        nn.Identity(),
        nn.Linear(128, 64),
        nn.Identity(),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )


def _named(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.detach() for name, tensor in module.state_dict().items()}


def build_hpsv2(folder: Path, file: str) -> open_clip.CLIP:
    """Write a checkpoint as HPSv2's training did, and return its network."""
    import open_clip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = open_clip.CLIP(**HPS_ARCHITECTURE).eval()
    torch.save({"epoch": 1, "name": "hps", "state_dict": model.state_dict()}, folder / file)
    return model


def build_aesthetic(folder: Path, features: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = published_head(features)
    torch.save(_named(head, "layers."), folder / AESTHETIC_FILE)
    return head


@dataclass(frozen=True)
class ImageRewardParts:
    vision: VisionTransformer
    text: Any
    head: nn.Sequential
    tokenizer: BertTokenizer

    def score(self, pixels: Tensor, prompt: str) -> float:
        """One image, normalised [3, 32, 32], with its prompt."""
        encoded = self.tokenizer(prompt, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
        # An additive mask of four dimensions is taken as it is: bidirectional although the model is a decoder.
        mask = (1 - encoded.attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        with torch.no_grad():
            read = self.text(
                input_ids=encoded.input_ids,
                attention_mask=mask.expand(-1, 1, 35, -1),
                encoder_hidden_states=self.vision.forward_features(pixels[None]),
            )
            raw = self.head(read.last_hidden_state[:, 0]).item()
        return (raw - 0.16717362830052426) / 1.0333394966054072


def build_imagereward(folder: Path, base: Path) -> ImageRewardParts:
    """Write ``ImageReward.pt`` to `folder` and a BERT tokenizer to `base`."""
    from timm.models.vision_transformer import VisionTransformer

    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS[:-2])})
    tokenizer.save_pretrained(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        vision = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=0, global_pool=""
        ).eval()
        settings = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=48,
            is_decoder=True,
            add_cross_attention=True,
        )
        text = BertModel(settings, add_pooling_layer=False).eval()
        # Unlike BERT, BLIP's text tower has no segments.
        nn.init.zeros_(text.embeddings.token_type_embeddings.weight)
        head = published_head(WIDTH)
        for parameter in (*vision.parameters(), *text.parameters()):
            if parameter.ndim == 1:  # away from 0 and 1, so that a swapped weight shows
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        extra = nn.Linear(WIDTH, 8)
    words = _named(text, "blip.text_encoder.")
    del words["blip.text_encoder.embeddings.token_type_embeddings.weight"]
    unused = _named(extra, "blip.vision_proj.") | _named(extra, "blip.text_proj.")
    unused["blip.text_encoder.embeddings.position_ids"] = torch.arange(48)[None]
    torch.save(
        _named(vision, "blip.visual_encoder.") | words | unused | _named(head, "mlp.layers."), folder / IMAGEREWARD_FILE
    )
    return ImageRewardParts(vision, text, head, tokenizer)
