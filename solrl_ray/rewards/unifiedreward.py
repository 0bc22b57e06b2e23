"""UnifiedReward 2.0 (Wang et al. 2025, arXiv 2503.05236): a Qwen vision-language model that writes three marks.

Supported are checkpoints based on Qwen2.5-VL and Qwen3-VL, whose classes are part of transformers. The first version
for Qwen (`UnifiedReward-qwen-7b`) also answers this question, but its marks differ. Checkpoints based on
LLaVA-OneVision need code of their authors, which is never run. `examples/pairwise` compares images with each other
instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from solrl_ray.config.problems import listed
from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints, qwen_vl
from solrl_ray.rewards.base import Keys

CLASSES = {
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, Qwen3VLProcessor),
}
"""``model_type`` → classes of model and processor."""
MARKS = ("Alignment", "Coherence", "Style")
LOW, HIGH = 1.0, 5.0
MAX_TOKENS = 128
"""Limit of an answer. Three marks with fifteen decimals, as in the training data, take about 80 tokens."""
_MARK = re.compile(rf"({'|'.join(MARKS)}) Score(?: \(1-5\))?: *(\d+(?:\.\d+)?)")


class UnifiedReward(qwen_vl.QwenVLReward):
    """The mean of the three marks, scaled from 1 … 5 to 0 … 1. Decoding is greedy, so the score is deterministic."""

    QUESTION = Path(__file__).with_name("unifiedreward_question.txt")

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, str]:
        """Folder and ``model_type`` of the checkpoint."""
        files = [*qwen_vl.PROCESSOR, checkpoints.TRANSFORMERS_WEIGHTS]
        folder = checkpoints.folder(config.path, files, keys("path"), whole=True)
        right = "CodeGoat24/UnifiedReward-2.0-qwen-7b"
        return folder, checkpoints.check_type(folder, list(CLASSES), config.path, keys("path"), config.kind, right)

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, model_type = self.folders(config, keys)
        model_class, processor_class = CLASSES[model_type]
        self._model = self._frozen(paths.load_weights(model_class, folder, keys("path"), dtype=qwen_vl.DTYPE))
        self._processor = qwen_vl.load_processor(processor_class, folder, keys("path"))
        size = self._processor.image_processor.size
        self._pixels = size["shortest_edge"], size["longest_edge"]

    def answer(self, given: dict[str, Tensor], prompt: str) -> Tensor:
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None}
        tokens = self._model.generate(**given, max_new_tokens=MAX_TOKENS, **greedy)[:, given["input_ids"].shape[1] :]
        answers = self._processor.batch_decode(tokens, skip_special_tokens=True)
        return torch.tensor([self._score(text, prompt) for text in answers])

    def _score(self, text: str, prompt: str) -> float:
        marks = {name: float(value) for name, value in _MARK.findall(text)}
        if len(marks) != len(MARKS) or not all(LOW <= mark <= HIGH for mark in marks.values()):
            raise RewardError(
                f"Reward {self.name} answered {text[:200]!r} for the prompt {prompt!r}; expected the marks "
                f"{listed(MARKS)} between {LOW:g} and {HIGH:g}. It would answer the same again: start a new run with "
                f"another reward and this run's policy (run.init)."
            )
        return (sum(marks.values()) / len(MARKS) - LOW) / (HIGH - LOW)
