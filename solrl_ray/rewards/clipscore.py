"""CLIPScore: the cosine between the CLIP features of an image and of its prompt (Hessel et al. 2021)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer, ImageProcessingMixin

from solrl_ray.errors import UserError
from solrl_ray.models import paths
from solrl_ray.models.base import freeze
from solrl_ray.rewards.base import Reward
from solrl_ray.rewards.preprocessing import Preprocessing

logger = logging.getLogger(__name__)


class CLIPScore(Reward):
    """cos(image, text) in [-1, 1] by a transformers `CLIPModel`, in float32.

    It is ``logits_per_image / logit_scale`` on the diagonal. The images of a call are one forward; each text
    is encoded once, alone, and its features are kept. A prompt longer than the text encoder takes is cut,
    with a warning and a count.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: CLIPTokenizer,
        preprocessing: Preprocessing,
        device: torch.device | str,
    ) -> None:
        super().__init__(name)
        self._device = torch.device(device)
        self._model: Any = freeze(model).to(self._device)
        self._tokenizer = tokenizer
        self._preprocessing = preprocessing
        self._max_tokens: int = model.config.text_config.max_position_embeddings
        self._texts: dict[str, Tensor] = {}
        self.truncated_prompts = 0
        """Distinct prompts that were cut so far."""

    @classmethod
    def load(cls, path: str, device: torch.device | str, *, key: str, name: str) -> CLIPScore:
        """Load model, tokenizer and image processor settings from a folder or Hugging Face id.

        Raises `UserError` naming `key` if the checkpoint is not there, incomplete or not a CLIP model.
        """
        if not path:
            raise UserError(f"{key} is empty; clipscore needs the folder or Hugging Face id of a CLIP checkpoint.")
        source = paths.checkpoint(path, key)
        kind = paths.read_json(source, "config.json", key).get("model_type")
        if kind != "clip":
            raise UserError(f"{key} is {path!r}, a checkpoint of type {kind!r}, but clipscore needs a 'clip' one.")
        model = paths.load_weights(CLIPModel, source, key, dtype=torch.float32)
        tokenizer = paths.load_tokenizer(CLIPTokenizer, source, key)
        try:
            settings, _ = ImageProcessingMixin.get_image_processor_dict(str(source))
            preprocessing = Preprocessing.from_config(settings)
        except (OSError, ValueError) as error:
            raise UserError(paths.unreadable(source, "its image processor", key, error)) from error
        return cls(name, model, tokenizer, preprocessing, device)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        texts = torch.stack([self._text_features(prompt) for prompt in prompts])
        pixels = self._preprocessing(images.to(self._device, torch.float32))
        features = self._model.get_image_features(pixel_values=pixels).pooler_output
        return (F.normalize(features, dim=-1) * texts).sum(dim=-1)

    def _text_features(self, prompt: str) -> Tensor:
        """Unit vector of a prompt, float32 [projection], cached."""
        if prompt not in self._texts:
            tokens = self._tokenizer(prompt, return_tensors="pt", verbose=False).input_ids
            if tokens.shape[1] > self._max_tokens:
                self.truncated_prompts += 1
                logger.warning(
                    "%s: a prompt of %d tokens is cut to %d (%d prompts cut so far): %.60s",
                    self.name,
                    tokens.shape[1],
                    self._max_tokens,
                    self.truncated_prompts,
                    prompt,
                )
                cut = {"truncation": True, "max_length": self._max_tokens}
                tokens = self._tokenizer(prompt, return_tensors="pt", **cut).input_ids
            features = self._model.get_text_features(input_ids=tokens.to(self._device)).pooler_output
            self._texts[prompt] = F.normalize(features[0], dim=-1)
        return self._texts[prompt]
