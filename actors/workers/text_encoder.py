"""An encoder: the text encoders of a model. All other roles get embeddings, by reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from actors.workers import devices
from solrl_ray import models
from solrl_ray.common.doing import doing
from solrl_ray.config.schema import Config
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.records import Prompt, PromptEmbedding


class TextEncoder(Callee):
    """The constructor loads nothing, so that errors in `start` reach the caller.

    ::

        start: load, take the digest ─► embed … ─► leave ─► embed: load again …

    In a process with other roles the text encoders leave the card between the stages of encoding. They are dropped
    rather than moved to the host: both bring T5-XXL's 9.5 GB back at the speed of copies from pageable memory, and the
    files are in the page cache, which the host may use otherwise. The digest is not taken again.
    """

    def __init__(self, config: Config, load: Callable[[], DiffusionModel] | None = None) -> None:
        """`load`: returns a model with its text encoders; default: onto the device of `fleet.encoders`."""
        self._config = config
        self._load = load or self._load_alone
        self._model: DiffusionModel | None = None

    def __repr__(self) -> str:
        """Shown in Ray's dashboard and before each line that this process logs."""
        return f"encoder of {self._config.model.family} prompts"

    def start(self) -> dict[str, str]:
        """Load; returns what fixes the bits of an embedding besides its text."""
        return self._identity()

    def embed(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        """The prompts' embeddings, in their order."""
        model = self._loaded()
        encoded = model.encode([prompt.text for prompt in prompts], self._config.fleet.encoding_batch)
        return [
            PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))
            for prompt, tensors in zip(prompts, encoded, strict=True)
        ]

    def leave(self) -> None:
        """Free the memory of the text encoders; `embed` loads them again."""
        self._model = None
        devices.free_cache()

    @noted
    def _identity(self) -> dict[str, str]:
        model = self._loaded()
        with doing("taking the digest of the text encoders"):
            return model.text_identity(self._config.fleet.encoding_batch)

    def _loaded(self) -> DiffusionModel:
        if self._model is None:
            self._model = self._load()
        return self._model

    @noted
    def _load_alone(self) -> DiffusionModel:
        # An embedding must not depend on the node's number of cores.
        device = devices.prepare(self._config.fleet.encoders, deterministic=self._config.run.deterministic)
        return models.load(self._config.model, device, components={"text"})
