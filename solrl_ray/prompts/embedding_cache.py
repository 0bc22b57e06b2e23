"""The cache of prompt embeddings on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from solrl_ray.common.files import replace_file
from solrl_ray.models.base import DiffusionModel
from solrl_ray.records import Prompt, PromptEmbedding

logger = logging.getLogger(__name__)


def embedding_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, over name, dtype, shape and bytes of each tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class EmbeddingCache:
    """Embeddings on disk, one safetensors file a prompt, encoded when first needed.

    A file's name is a digest of the prompt and of all that fixes the bits of its embedding (weights of the text
    encoders, tokenizers, sequence length, dtype, device type, libraries), so that runs may share a folder. Files appear
    by rename; a damaged one is encoded again, with a warning.
    """

    def __init__(self, folder: Path, model: DiffusionModel) -> None:
        """`model` must have its text encoders."""
        self._folder = folder
        self._model = model
        self._identity = json.dumps(model.text_identity(), sort_keys=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, prompts: Sequence[Prompt]) -> list[PromptEmbedding]:
        """The prompts' embeddings, in their order. Missing ones are encoded, each prompt alone."""
        found: dict[str, PromptEmbedding] = {}
        for prompt in prompts:
            if prompt.id not in found:
                found[prompt.id] = self._read(prompt) or self._encode(prompt)
        return [found[prompt.id] for prompt in prompts]

    def _file(self, prompt: Prompt) -> Path:
        name = hashlib.sha256(f"{self._identity}\n{prompt.text}".encode()).hexdigest()
        return self._folder / f"{name}.safetensors"

    def _read(self, prompt: Prompt) -> PromptEmbedding | None:
        file = self._file(prompt)
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as content:
                expected = (content.metadata() or {}).get("digest")
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            logger.warning("embedding of %.60r is encoded again: %s cannot be read: %s", prompt.text, file, error)
            return None
        digest = embedding_digest(tensors)
        if digest != expected:
            logger.warning("embedding of %.60r is encoded again: %s is damaged", prompt.text, file)
            return None
        return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=digest)

    def _encode(self, prompt: Prompt) -> PromptEmbedding:
        tensors = {name: tensor.contiguous() for name, tensor in self._model.encode([prompt.text])[0].items()}
        digest = embedding_digest(tensors)
        replace_file(self._file(prompt), save(tensors, metadata={"digest": digest}))
        return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=digest)
