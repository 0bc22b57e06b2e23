"""The process with the text encoders. All others get embeddings, by reference."""

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
    """The constructor loads nothing, so that errors in `start` reach the caller."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._cache: EmbeddingCache | None = None

    def __repr__(self) -> str:
        """Shown in Ray's dashboard and before each line that this process logs."""
        return f"encoder of {self._config.model.family} prompts"

    @noted
    def start(self) -> None:
        torch.set_num_threads(1)  # an embedding must not depend on the node's number of cores
        model = models.load(self._config.model, "cpu", components={"text"})
        with doing("taking the digest of the text encoders"):
            self._cache = EmbeddingCache(self._folder, model)

    def embed(self, prompt: Prompt) -> PromptEmbedding:
        """The prompt's embedding, from the cache on disk or encoded now."""
        if self._cache is None:
            raise RunError("the text encoder was used before it was started")
        return self._cache.get([prompt])[0]
