"""HPSv3 (Ma et al. 2025, arXiv 2508.03789): Qwen2-VL-7B fine-tuned on human preferences, with a head on one token.

The published code is for transformers 4.45 and is not run: the weights are loaded into transformers' network and the
head below. Scores depend on two properties of that code (MizzenAI/HPSv3, `model/qwen2vl_trainer.py`):

* Image tokens have the plain positions 0, 1, 2, … of a text, not Qwen2-VL's positions of time, row and column: the
  published forward passes none to the language model, in training too.
* The score is the first output, the mean of the estimated preference; the second output is its uncertainty.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Qwen2VLConfig, Qwen2VLProcessor

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.rewards import checkpoints, qwen_vl
from solrl_ray.rewards.base import Keys

FILE = "HPSv3.safetensors"
TOKEN = "<|Reward|>"
"""A token added to Qwen2-VL's tokenizer; the head reads its hidden state."""
AREA = 256 * 28 * 28
"""Pixels of a resized image: a square image of 512 or 1024 px becomes 448 x 448."""


class HPSv3(qwen_vl.QwenVLReward):
    """The mean preference, unbounded, about -5 to 15. `path` holds `FILE`, `base` is Qwen2-VL-7B-Instruct.

    As published, the network is in bfloat16 and the head in float32.
    """

    QUESTION = Path(__file__).with_name("hpsv3_question.txt")

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, base = self.folders(config, keys)
        processor = qwen_vl.load_processor(Qwen2VLProcessor, base, keys("base"))
        processor.tokenizer.add_tokens([TOKEN], special_tokens=True)
        sizes = Qwen2VLConfig.from_pretrained(str(base))
        weights = _read(folder, keys("path"))
        head = score_head(sizes.text_config.hidden_size)
        checkpoints.fill(head, checkpoints.under(weights, "rm_head."), folder, FILE, keys("path"))
        sizes.text_config.vocab_size = len(processor.tokenizer)
        named = {key: tensor for key, tensor in weights.items() if not key.startswith("rm_head.")}
        self._model = self._frozen(qwen_vl.network(sizes, named, folder, FILE, keys("path")))
        self._head, self._processor, self._pixels = self._frozen(head), processor, (AREA, AREA)
        self._token = processor.tokenizer.convert_tokens_to_ids(TOKEN)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, Path]:
        """Folders of the checkpoint and of Qwen2-VL."""
        folder = checkpoints.folder(config.path, [(FILE,)], keys("path"))
        return folder, qwen_vl.base_folder(config, keys, "Qwen/Qwen2-VL-7B-Instruct")

    def answer(self, given: dict[str, Tensor], prompt: str) -> Tensor:
        hidden = qwen_vl.hidden_states(self._model, given)
        scores: Tensor = self._head(hidden[given["input_ids"] == self._token].float())
        return scores[:, 0]


def score_head(features: int) -> nn.Sequential:
    """Linear layers features-1024-16-2, ReLU after the first two, float32. Parameters have the published names."""
    return nn.Sequential(
        nn.Linear(features, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def _read(folder: Path, key: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(paths.unreadable(folder, FILE, key, error)) from error
