"""The encoder: one process with the text encoders. Everybody else gets embeddings, by reference."""

from __future__ import annotations

from pathlib import Path

import torch

from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from solrl_ray import models
from solrl_ray.common.doing import doing
from solrl_ray.config.schema import Config
from solrl_ray.errors import RunError
from solrl_ray.prompts.embedding_cache import EmbeddingCache
from solrl_ray.records import Prompt, PromptEmbedding


class TextEncoder(Callee):
    """Made without loading anything: what goes wrong in `start` arrives as itself, not as a death."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._cache: EmbeddingCache | None = None

    def __repr__(self) -> str:
        """What Ray shows in its dashboard and before each line that this process logs."""
        return f"encoder of {self._config.model.family} prompts"

    @noted
    def start(self) -> None:
        """Load the text encoders."""
        torch.set_num_threads(1)  # an embedding must not depend on how many cores this node has
        model = models.load(self._config.model, "cpu", components={"text"})
        with doing("taking the digest of the text encoders"):
            self._cache = EmbeddingCache(self._folder, model)

    def embed(self, prompt: Prompt) -> PromptEmbedding:
        """The prompt's embedding, from the cache on disk or encoded now."""
        if self._cache is None:
            raise RunError("the text encoder was used before it was started")
        return self._cache.get([prompt])[0]
