"""A reward for rendered text: compares the quoted text of a prompt with the text that RapidOCR reads in the image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from rapidocr import RapidOCR
from torch import Tensor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import eight_bits

QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|「([^」]+)」')


class Ocr(CheckpointReward):
    """1 - edits / letters, with the edit distance from the recognised to the wanted text, at most all its letters.

    Case, spaces and line breaks do not count. Further text is ignored if the image has the whole wanted text, as in
    Flow-GRPO (arXiv 2505.05470). The PP-OCR models are part of the package `rapidocr` and run on the CPU, with the
    worker's threads.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        settings = {
            "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Global.log_level": "critical",
        }
        self._engine = RapidOCR(params=settings)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        wanted = [self._wanted(prompt) for prompt in prompts]
        arrays = eight_bits(images).to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
        pairs = zip(arrays, wanted, strict=True)
        return torch.tensor([rendered(self._read(image), text) for image, text in pairs])

    def _wanted(self, prompt: str) -> str:
        text = quoted(prompt)
        if not letters(text):
            raise RewardError(
                f"Reward {self.name} got the prompt {prompt!r}, which has no text in quotation marks to render."
            )
        return text

    def _read(self, image: np.ndarray) -> str:
        """The text in an image, uint8 [H, W, 3], RGB; the engine takes BGR."""
        result: Any = self._engine(np.ascontiguousarray(image[..., ::-1]))
        return "".join(result.txts or ())


def quoted(prompt: str) -> str:
    """All quoted texts of a prompt, joined by spaces."""
    return " ".join("".join(groups) for groups in QUOTED.findall(prompt))


def letters(text: str) -> str:
    return "".join(text.split()).casefold()


def rendered(read: str, wanted: str) -> float:
    """Share of the letters of `wanted` that are correct in `read`, between 0 and 1."""
    found, target = letters(read), letters(wanted)
    edits = 0 if target in found else min(Levenshtein.distance(found, target), len(target))
    return 1.0 - edits / len(target)
