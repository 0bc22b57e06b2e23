"""The encoder: one process with the text encoders. Everybody else gets embeddings, by reference."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.devices import device_of
from solrl_ray import models
from solrl_ray.config.schema import Config
from solrl_ray.prompts import EmbeddingCache
from solrl_ray.records import Prompt, PromptEmbedding


class Encoder:
    def __init__(self, config: Config, folder: Path) -> None:
        torch.set_num_threads(1)  # an embedding must not depend on how many cores this node has
        model = models.load(config.model, device_of(0), components={"text"})
        self._cache = EmbeddingCache(folder, model)

    def embed(self, prompt: Prompt) -> PromptEmbedding:
        """The prompt's embedding, from the cache on disk or encoded now."""
        return self._cache.get([prompt])[0]
