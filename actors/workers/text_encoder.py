"""Actor that encodes prompts: the text encoders of a model, and its autoencoder if prompts have reference images."""

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

        start: load, compute the digest ─► embed … ─► leave ─► embed: load again …

    On a shared GPU, `leave` unloads the text encoders whenever no prompts are left to encode, and before another role
    loads its weights. They are loaded from their files again instead of being kept in host memory: T5-XXL's 9.5 GB come
    back equally fast from the page cache and from pageable memory, and the system can reclaim the page cache. The
    digest is computed only once.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model: DiffusionModel | None = None
        self._shared: SharedModel | None = None

    def _title(self) -> str:
        return f"encoder of {self._config.model.family} prompts"

    def share(self, model: SharedModel) -> None:
        """Share the process of a GPU. The text encoders are not part of the shared model, which stays on the GPU."""
        self._shared = model
        model.free_text = self.leave

    def start(self) -> dict[str, str]:
        """Load the text encoders; returns everything besides the text that determines the bits of an embedding."""
        return self._identity()

    def embed(self, prompts: Sequence[Prompt], files: Sequence[Sequence[bytes]] = ()) -> list[PromptEmbedding]:
        """Embeddings of the prompts, in the same order.

        `files`: contents of the reference images of each prompt; empty if the model takes none.
        """
        encoded = encode_prompts(self._loaded(), prompts, encoding_batch(self._config.fleet), files or None)
        return [
            PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=embedding_digest(tensors))
            for prompt, tensors in zip(prompts, encoded, strict=True)
        ]

    def leave(self) -> None:
        """Unload the text encoders and free their memory; `embed` loads them again."""
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
        # `prepare` fixes the threads: an embedding must not depend on the node's number of cores.
        device = devices.prepare(encoder_of(self._config.fleet), deterministic=self._config.run.deterministic)
        return models.load(self._config.model, device, components=models.encoder_components(self._config.model))
