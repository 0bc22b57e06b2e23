"""Base of rewards on Qwen's vision-language models: required files, and questions about images as tokens."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints, pillow
from solrl_ray.rewards.base import VIDEOS, CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import eight_bits

DTYPE = torch.bfloat16
"""Data type of the network, as published. Everything after its last layer is computed in float32."""
PROCESSOR = (
    checkpoints.CONFIG,
    checkpoints.IMAGE_PROCESSOR,
    checkpoints.CLIP_TOKENIZER,
    ("tokenizer_config.json",),
    ("chat_template.json", "chat_template.jinja", "tokenizer_config.json"),
)
"""Files of a checkpoint that its processor needs."""
_RENAMED = (
    (re.compile(r"^(model\.)?visual\."), "visual."),
    (re.compile(r"^model\.(language_model\.)?(?!visual\.)"), "language_model."),
)
"""Names in transformers before and since 4.52 → names in `Qwen2VLModel`."""


class QwenVLReward(CheckpointReward):
    """Scores the images or videos of a prompt in one forward without padding, independently of other prompts.

    Images are rounded to 8 bits and resized as in Pillow to whole patches, by the rule of Qwen's image processor.
    """

    QUESTION: ClassVar[Path]
    """File with the question of the network's training, exact to the last space. ``{prompt}`` stands for the prompt."""

    _model: Any
    _processor: Any
    """The checkpoint's processor."""
    _pixels: tuple[int, int]
    """Smallest and largest area of a resized image or frame, pixels."""

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        self._question = self.QUESTION.read_text(encoding="utf-8")

    @abstractmethod
    def answer(self, given: dict[str, Tensor], prompt: str) -> Tensor:
        """Scores [B] of B images or videos of one prompt; `given` is the result of `inputs`."""

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = torch.empty(len(images))
        for prompt in dict.fromkeys(prompts):
            rows = torch.tensor([row for row, other in enumerate(prompts) if other == prompt])
            shown = prompt.replace("<|", "< |")  # so that it cannot contain special tokens, such as <|image_pad|>
            given = self.inputs(images[rows.to(images.device)], self._question.replace("{prompt}", shown))
            scores[rows] = self.answer(given, prompt).float().cpu()
        return scores

    def inputs(self, images: Tensor, question: str) -> dict[str, Tensor]:
        """The network's arguments for B images or videos, each followed by the same question."""
        kind, options = "image", {"do_resize": False}
        if images.ndim == VIDEOS:
            kind, options, images = "video", options | {"do_sample_frames": False}, images.transpose(1, 2)
        chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": question}]}]
        text: str = self._processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        patches = getattr(self._processor, f"{kind}_processor")
        size = smart_resize(*images.shape[-2:], patches.patch_size * patches.merge_size, *self._pixels)
        resized = pillow.resize(eight_bits(images.to(self._device)), size, "bicubic").to(torch.uint8)
        seen = {f"{kind}s": list(resized), f"{kind}s_kwargs": options}
        given = self._processor(text=[text] * len(images), **seen, return_tensors="pt")
        return dict(given.to(self._device))


def load_processor(processor_class: Any, folder: Path, key: str) -> Any:
    """The processor of a checkpoint. Raises UserError naming `key` if it cannot be read or has no chat template."""
    try:
        processor = processor_class.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(paths.unreadable(folder, processor_class.__name__, key, error)) from error
    if processor.chat_template is None and processor.tokenizer.chat_template is None:
        raise UserError(paths.unreadable(folder, "its chat template", key, ValueError("no file has one")))
    return processor


def base_folder(config: RewardConfig, keys: Keys, right: str) -> Path:
    """The folder of `base`. Raises UserError if it is no Qwen2-VL checkpoint; `right` is the id of a valid one."""
    base = checkpoints.folder(config.base, PROCESSOR, keys("base"))
    checkpoints.check_type(base, ["qwen2_vl"], config.base, keys("base"), config.kind, right)
    return base


def hidden_states(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states, [B, tokens, width]; image tokens have the plain positions 0, 1, 2, … of a text."""
    tokens = given["input_ids"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
    hidden: Tensor = model(**given, position_ids=positions, use_cache=False).last_hidden_state
    return hidden


def network(sizes: Qwen2VLConfig, weights: Mapping[str, Tensor], folder: Path, file: str, key: str) -> Qwen2VLModel:
    """Qwen2-VL without its language head, with the weights of `file`, whose names may be of any transformers version.

    Raises UserError naming `key` if the weights do not fit.
    """
    named = {_renamed(name): tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    try:
        with progress_note(f"loading {file}"):
            model, info = Qwen2VLModel.from_pretrained(
                None, config=sizes, state_dict=named, dtype=DTYPE, output_loading_info=True
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(paths.unreadable(folder, file, key, error)[:600]) from error
    if wrong := sorted(info["missing_keys"] | info["unexpected_keys"]):
        raise UserError(paths.unreadable(folder, file, key, ValueError(f"it does not fit Qwen2-VL, first {wrong[0]}")))
    return model


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        if pattern.match(name):
            return pattern.sub(replacement, name)
    return name
