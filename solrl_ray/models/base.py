"""What the rest of the project knows of a text-to-image model: encode, velocity, decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from solrl_ray.config.schema import Model
from solrl_ray.records import PromptEmbedding

Component = Literal["text", "transformer", "vae"]
COMPONENTS: frozenset[Component] = frozenset({"text", "transformer", "vae"})

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DiffusionModel(ABC):
    """A rectified-flow model: x_sigma = (1 - sigma) x0 + sigma noise, velocity = noise - x0.

    Only the components that were asked for are loaded; using another one raises `ValueError`. Modules are
    frozen and in eval mode. States between solver steps are float32, the network computes in `dtype`.
    """

    latent_shape: tuple[int, ...]
    """Shape of one sample's state as the transformer takes it, without the batch dimension."""
    image_tokens: int
    """Length of the image sequence: what resolution-dependent sigma schedules are shifted by."""

    def __init__(self, config: Model, device: torch.device | str, modules: dict[Component, nn.Module]) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = DTYPES[config.dtype]
        self._modules = {name: freeze(module) for name, module in modules.items()}

    @property
    def components(self) -> frozenset[Component]:
        return frozenset(self._modules)

    @property
    def transformer(self) -> nn.Module:
        return self._module("transformer")

    def _module(self, name: Component) -> nn.Module:
        if name not in self._modules:
            loaded = ", ".join(sorted(self._modules)) or "nothing"
            raise ValueError(f"component {name!r} of {self.config.path} was not loaded, only {loaded}")
        return self._modules[name]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[dict[str, Tensor]]:
        """Encode each text alone, so that an embedding is a function of its text and not of its neighbours.

        Returns one dict a text: tensors by name in `dtype`, without batch dimension, on the CPU.
        """

    @abstractmethod
    def text_identity(self) -> dict[str, str]:
        """What fixes the bits of `encode` besides the text: weights, settings, libraries, device."""

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: float | Tensor, embedding: dict[str, Tensor]) -> Tensor:
        """Predict the velocity.

        Args:
            latents: [B, *latent_shape], any float dtype.
            sigma: noise level in [0, 1], one number or a tensor [B].
            embedding: what `batch_embeddings` returns, batched B or 1 (one prompt for all).

        Returns:
            float32 [B, *latent_shape].
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Turn clean latents [B, *latent_shape] into images, float32 [B, 3, H, W] in [0, 1]."""

    def batch_embeddings(self, embeddings: Sequence[PromptEmbedding]) -> dict[str, Tensor]:
        """Stack embeddings in the given order on the device: each tensor is [B, ...] in `dtype`.

        A batch of one prompt repeated is a view of a single copy.
        """
        if not embeddings:
            raise ValueError("a batch needs at least one prompt embedding")
        names = embeddings[0].tensors.keys()
        if any(embedding.tensors.keys() != names for embedding in embeddings):
            raise ValueError("prompt embeddings of different families cannot share a batch")
        one_prompt = len({embedding.digest for embedding in embeddings}) == 1
        chosen = embeddings[:1] if one_prompt else embeddings
        batch = {}
        for name in names:
            stacked = torch.stack([embedding.tensors[name] for embedding in chosen])
            stacked = stacked.to(device=self.device, dtype=self.dtype)
            batch[name] = stacked.expand(len(embeddings), *stacked.shape[1:])
        return batch


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode (a module built from its configuration drops out at random) and no gradients."""
    return module.eval().requires_grad_(False)


def check_components(components: Collection[str]) -> frozenset[Component]:
    """Raise `ValueError` for a component that no model has."""
    unknown = set(components) - COMPONENTS
    if unknown:
        raise ValueError(f"unknown components {sorted(unknown)}; a model has {sorted(COMPONENTS)}")
    return frozenset(name for name in COMPONENTS if name in components)
