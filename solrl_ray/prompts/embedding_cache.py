"""The cache of prompt embeddings on disk: which prompts lack one, reading and writing, damaged files."""

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
    """SHA-256, in hex, over name, dtype, shape and bytes of each tensor, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class EmbeddingCache:
    """Embeddings on disk, one safetensors file a prompt.

    A file's name is a digest of the prompt and of all that fixes the bits of its embedding (weights of the text
    encoders, tokenizers, sequence length, dtype, device, libraries), so that runs may share a folder. Files appear by
    rename. They are not synced to the disk: each is verified when it is read, and can be made again.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        """`identity`: what `DiffusionModel.text_identity` returns."""
        self._folder = folder
        self._identity = json.dumps(identity, sort_keys=True)
        self._largest = 0
        """Bytes of the largest embedding so far."""

    def lacking(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those without a file."""
        return [prompt for prompt in prompts if not self._file(prompt).exists()]

    def affordable(self, prompts: Sequence[Prompt], free_gb: float) -> list[Prompt]:
        """As many of the first as leave this much of the disk free, if embeddings are as large as those so far."""
        make_folder(self._folder)
        room = free_bytes(self._folder) - free_gb * 1e9
        return list(prompts[: max(0, int(room // max(1, self._largest)))])

    def read(self, prompt: Prompt) -> PromptEmbedding | None:
        """The prompt's embedding; None if there is none. A damaged file is removed, with a warning."""
        file = self._file(prompt)
        if not file.exists():
            return None
        try:
            content = read_regular(file)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            tensors, expected = load(content), header["__metadata__"]["digest"]
            if embedding_digest(tensors) != expected:
                raise ValueError("its digest is another one")
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            logger.warning("embedding of %.60r is encoded again: %s is damaged: %s", prompt.text, file, error)
            with suppress(OSError):
                file.unlink(missing_ok=True)
            return None
        self._largest = max(self._largest, len(content))
        return PromptEmbedding(prompt_id=prompt.id, tensors=tensors, digest=expected)

    def write(self, prompts: Sequence[Prompt], embeddings: Sequence[PromptEmbedding]) -> None:
        """Raises RunError if the disk is full or takes no files."""
        for prompt, embedding in zip(prompts, embeddings, strict=True):
            tensors = {name: tensor.contiguous() for name, tensor in embedding.tensors.items()}
            content = save(tensors, metadata={"digest": embedding.digest})
            self._largest = max(self._largest, len(content))
            try:
                replace_file(self._file(prompt), content, synced=False)
            except OSError as error:
                mend = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
                raise RunError(
                    f"embeddings of prompts cannot be written to {self._folder}: {error.strerror}; {mend} and go on "
                    "with --resume, which encodes only what is missing"
                ) from error

    def _file(self, prompt: Prompt) -> Path:
        whole = "\0".join([prompt.text, *(reference.digest for reference in prompt.references)])
        name = hashlib.sha256(f"{self._identity}\n{whole}".encode()).hexdigest()
        return self._folder / f"{name}.safetensors"
