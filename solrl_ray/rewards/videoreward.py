"""VideoReward (Liu et al. 2025, arXiv 2501.13918): Qwen2-VL-2B fine-tuned on human preferences between videos.

It estimates visual quality, motion quality and text alignment, each from the hidden state of a separate token. The
published code (KwaiVGI/VideoAlign) is for transformers 4.45 and is not run: its weights are loaded into transformers'
network and the head below. Scores depend on these details:

* The checkpoint is the state of a PEFT model. Here its LoRA is added to the weights once, in float32; the published
  code applies it in each forward, so scores differ by rounding.
* Video tokens have the plain positions 0, 1, 2, … of a text, as in HPSv3.
* Each quality is normalised with the mean and standard deviation in ``model_config.json``; the score is the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLProcessor

from solrl_ray.config.rewards import RewardConfig, evenly_spaced
from solrl_ray.errors import MissingCheckpoint, UserError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints, qwen_vl
from solrl_ray.rewards.base import VIDEOS, Keys

SETTINGS = "model_config.json"
WEIGHTS = "model.pth"
QUALITIES = ("VQ", "MQ", "TA")
"""Visual quality, motion quality, text alignment: in the order of the question."""
TOKENS = tuple(f"<|{quality}_reward|>" for quality in QUALITIES)
LEAST_AREA = 128 * 28 * 28
"""Minimum number of pixels of a resized frame; the maximum is ``max_frame_pixels`` in the settings."""


class VideoReward(qwen_vl.QwenVLReward):
    """The sum of the three normalised qualities, about -6 to 6.

    `path` is the published folder, `base` is Qwen2-VL-2B-Instruct. The network is in bfloat16, the head in float32.
    """

    ndims = (VIDEOS,)
    QUESTION = Path(__file__).with_name("videoreward_question.txt")

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, weights_file, base = self.folders(config, keys)
        settings = _settings(folder, keys("path"))
        processor = qwen_vl.load_processor(Qwen2VLProcessor, base, keys("base"))
        processor.tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
        sizes = Qwen2VLConfig.from_pretrained(str(base))
        sizes.text_config.vocab_size = len(processor.tokenizer)
        state = checkpoints.read_torch(weights_file.parent, WEIGHTS, keys("path"))
        try:
            weights = merged(state, settings.get("peft_lora_config") or {})
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError(paths.unreadable(folder, WEIGHTS, keys("path"), error)[:600]) from error
        head = weights.pop("rm_head.weight", torch.empty(0, 0)).float()
        if head.shape not in ((1, sizes.text_config.hidden_size), (len(QUALITIES), sizes.text_config.hidden_size)):
            raise UserError(
                f"{keys('path')} is {config.path!r}, but the head of {WEIGHTS} has the shape {list(head.shape)}; right "
                f"would be [1 or 3, {sizes.text_config.hidden_size}]."
            )
        self._model = self._frozen(qwen_vl.network(sizes, weights, folder, WEIGHTS, keys("path")))
        self._processor, self._pixels = processor, (LEAST_AREA, int(settings["data_config"]["max_frame_pixels"]))
        assert config.frames is not None  # `reward_kinds.check_frames`
        self._frames = config.frames.count
        self._head = head.expand(len(QUALITIES), -1).to(self._device)  # one row is shared by all qualities
        self._tokens = processor.tokenizer.convert_tokens_to_ids(list(TOKENS))
        scale = settings["inference_config"]
        self._mean = torch.tensor([float(scale[f"{quality}_mean"]) for quality in QUALITIES], device=self._device)
        self._std = torch.tensor([float(scale[f"{quality}_std"]) for quality in QUALITIES], device=self._device)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, Path, Path]:
        """The checkpoint's folder, its newest weights file, and the folder of Qwen2-VL."""
        folder = checkpoints.folder(config.path, [(SETTINGS,)], keys("path"), whole=True)
        files = {_step(file): file for file in folder.glob(f"checkpoint-*/{WEIGHTS}") if _step(file).isdecimal()}
        if not files:
            lacking = f"{keys('path')} is {config.path!r}, but no checkpoint-NUMBER/{WEIGHTS} is in {folder};"
            if isinstance(paths.checkpoint(config.path, keys("path")), Path):
                raise UserError(f"{lacking} copy it there.")
            raise MissingCheckpoint(f"{lacking} run `hf download {config.path}` on every machine that scores.")
        newest = files[max(files, key=int)]
        return folder, newest, qwen_vl.base_folder(config, keys, "Qwen/Qwen2-VL-2B-Instruct")

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return super().compute(images[:, :, evenly_spaced(images.shape[2], self._frames)], prompts)

    def answer(self, given: dict[str, Tensor], prompt: str) -> Tensor:
        hidden, tokens = qwen_vl.hidden_states(self._model, given), given["input_ids"]
        states = torch.stack([hidden[tokens == token] for token in self._tokens], dim=1).float()
        return ((torch.einsum("bqw,qw->bq", states, self._head) - self._mean) / self._std).sum(dim=1)


def merged(state: Mapping[str, Tensor], lora: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add the LoRA of a PEFT model's `state` to its weights; returns them under their names without PEFT.

    `lora`: the published settings ``lora_alpha`` and ``use_rslora``.
    """
    named = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
    plain = {
        key.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."): tensor
        for key, tensor in named.items()
        if ".lora_" not in key and ".original_module." not in key
    }
    for kind in ("lora_", "lora_embedding_"):
        for key, down in named.items():
            layer, found, rest = key.partition(f".{kind}A.default")
            if not found:
                continue
            up = named[f"{layer}.{kind}B.default{rest}"]
            rank = len(down)
            scale = float(lora["lora_alpha"]) / (rank**0.5 if lora.get("use_rslora") else rank)
            change = scale * (up.float() @ down.float())
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = (weight.float() + (change if kind == "lora_" else change.T)).to(weight.dtype)
    return plain


def _settings(folder: Path, key: str) -> dict[str, Any]:
    settings = paths.read_json(folder, SETTINGS, key)
    needed = {"data_config": ["max_frame_pixels"]}
    needed |= {"inference_config": [f"{quality}_{part}" for quality in QUALITIES for part in ("mean", "std")]}
    for section, names in needed.items():
        values = settings.get(section)
        for name in names:
            if not isinstance(values, dict) or not isinstance(values.get(name), int | float):
                raise UserError(paths.unreadable(folder, SETTINGS, key, ValueError(f"it has no {section}.{name}")))
    return settings


def _step(weights: Path) -> str:
    """The NUMBER of ``checkpoint-NUMBER/model.pth``."""
    return weights.parent.name.removeprefix("checkpoint-")
