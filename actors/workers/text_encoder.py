"""The text encoders of a model, and with references its autoencoder. Other roles get embeddings, by reference."""

from __future__ import annotations

from collections.abc import Sequence

from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from actors.workers import devices
from solrl_ray import models
from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.pools import encoder_of, encoding_batch
from solrl_ray.config.schema import Config
from solrl_ray.gpu.shared_model import SharedModel
from solrl_ray.models.base import DiffusionModel
from solrl_ray.prompts.embedding_cache import embedding_digest
from solrl_ray.prompts.encoding import encode_prompts
from solrl_ray.records import Prompt, PromptEmbedding


class TextEncoder(Callee):
    """The constructor loads nothing, so that errors in `start` reach the caller.

    ::

        start: load, take the digest ─► embed … ─► leave ─► embed: load again …

    As a role of a card it is asked to let the text encoders leave between the stages of encoding; they also
    leave before another role loads. They are dropped rather than moved to the host: both bring T5-XXL's 9.5 GB back at
    the speed of copies from pageable memory, and the files are in the page cache, which the host may use otherwise. The
    digest is not taken again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: DiffusionModel | None = None
        self._shared: SharedModel | None = None

    def _title(self) -> str:
        return f"encoder of {self._config.model.family} prompts"

    def share(self, model: SharedModel) -> None:
        """Live in a card's process. Text encoders are no part of the shared copy, which stays on the card."""
        self._shared = model
        model.free_text = self.leave

    def start(self) -> dict[str, str]:
        """Load; returns what fixes the bits of an embedding besides its text."""
        return self._identity()

    def embed(self, prompts: Sequence[Prompt], files: Sequence[Sequence[bytes]] = ()) -> list[PromptEmbedding]:
        """The prompts' embeddings, in their order; `files`: with references the contents of each prompt's."""
        encoded = encode_prompts(self._loaded(), prompts, encoding_batch(self._config.fleet), files or None)
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
        with progress_note("taking the digest of the text encoders"):
            return model.text_identity(encoding_batch(self._config.fleet))

    def _loaded(self) -> DiffusionModel:
        if self._shared is not None:
            self._shared.bring_weights_for("encoder")
        if self._model is None:
            self._model = self._load()
        return self._model

    @noted
    def _load(self) -> DiffusionModel:
        # An embedding must not depend on the node's number of cores.
        device = devices.prepare(encoder_of(self._config.fleet), deterministic=self._config.run.deterministic)
        return models.load(self._config.model, device, components=models.encoder_components(self._config.model))
