"""Cache of prompt embeddings on disk. Damaged files are found and removed."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from solrl_ray.common.files import free_bytes, make_folder, read_regular, replace_file
from solrl_ray.errors import RunError
from solrl_ray.records import Prompt, PromptEmbedding

logger = logging.getLogger(__name__)


def embedding_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of each tensor, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class EmbeddingCache:
    """Embeddings on disk, one safetensors file per prompt.

    A file name is a digest of the prompt and of everything that determines the bits of its embedding: weights of the
    text encoders, tokenizers, sequence length, dtype, device and library versions. So runs may share a folder. Files
    are written under a temporary name and renamed. They are not synced to the disk, because each is verified when it is
    read and can be computed again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        """`identity`: the result of `DiffusionModel.text_identity`."""
        self._folder = folder
        self._identity = json.dumps(identity, sort_keys=True)
        self._largest = 0
        """Size of the largest embedding so far, in bytes."""

    def lacking(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that have no file in the cache."""
        return [prompt for prompt in prompts if not self._file(prompt).exists()]

    def affordable(self, prompts: Sequence[Prompt], free_gb: float) -> list[Prompt]:
        """The first prompts whose embeddings fit on the disk while `free_gb` GB stay free.

        Assumes that each embedding is as large as the largest one so far.
        """
        make_folder(self._folder)
        available = free_bytes(self._folder) - free_gb * 1e9
        return list(prompts[: max(0, int(available // max(1, self._largest)))])

    def read(self, prompt: Prompt) -> PromptEmbedding | None:
        """The embedding of a prompt; None if it is not cached. A damaged file is removed, with a warning."""
        file = self._file(prompt)
        if not file.exists():
            return None
        try:
            content = read_regular(file)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            tensors, expected = load(content), header["__metadata__"]["digest"]
            if embedding_digest(tensors) != expected:
                raise ValueError("its digest does not match")
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            logger.warning("the prompt %.60r is encoded again, because %s is damaged: %s", prompt.text, file, error)
            with suppress(OSError):
                file.unlink(missing_ok=True)
            return None
        self._largest = max(self._largest, len(content))
        return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=expected)

    def write(self, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> None:
        """Store embeddings. Raises RunError if the disk is full or the folder cannot be written."""
        for prompt, embedding in zip(prompts, embeddings, strict=True):
            tensors = {name: tensor.contiguous() for name, tensor in embedding.tensors.items()}
            content = save(tensors, metadata={"digest": embedding.digest})
            self._largest = max(self._largest, len(content))
            try:
                replace_file(self._file(prompt), content, synced=False)
            except OSError as error:
                fix = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix that"
                raise RunError(
                    f"embeddings of prompts cannot be written to {self._folder}: {error.strerror}; {fix} and continue "
                    "with --resume, which encodes only the missing prompts"
                ) from error

    def _file(self, prompt: Prompt) -> Path:
        whole = "\0".join([prompt.text, *(reference.digest for reference in prompt.references)])
        name = hashlib.sha256(f"{self._identity}\n{whole}".encode()).hexdigest()
        return self._folder / f"{name}.safetensors"
