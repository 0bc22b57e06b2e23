"""How much memory do activations of a forward without gradient and of decoding take? For solrl_ray/models/sizes.py.

    python benchmarks/activation_sizes.py [flux1_dev …]

Runs the published architectures on the meta device, where tensors have shapes and no memory, and adds up the bytes of
live tensors at each moment. Attention counts as one kernel; nothing is compiled; workspaces are left out. Takes
seconds, needs no GPU and no weights.
"""

from __future__ import annotations

import argparse
import math
import weakref
from collections.abc import Sequence
from typing import Any

import model_shapes
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan
from full_size import DECODERS, random_embeddings
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from solrl_ray import models

SAMPLES = 2
LATENT_FRAMES = 3
"""Latent frames of a video: the first two are decoded differently from all later ones."""


class Alive(TorchDispatchMode):
    """Counts the bytes of live tensors, without the parameters and buffers of `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes = {t.untyped_storage()._cdata: 0 for t in (*module.parameters(), *module.buffers())}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def one_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Attention that allocates only its result."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.no_grad()
def forward_values(name: str) -> float:
    """Peak number of values that a forward holds, per channel, token and sample."""
    config = model_shapes.configuration(name)
    family = models.family(config)
    settings, autoencoder = model_shapes.PUBLISHED[name]
    with torch.device("meta"):
        transformer: Any = family.adapt_(family.TRANSFORMER.from_config(settings)).to(torch.bfloat16).eval()
    model = family(
        config,
        "meta",
        {"transformer": transformer},
        transformer_config=dict(transformer.config),
        vae_config=autoencoder,
    )
    batch = model.batch_embeddings(random_embeddings(config, SAMPLES))
    latents = torch.empty(SAMPLES, *model.latent_shape, device="meta")
    with Alive(transformer) as alive:
        model.velocity(latents, 0.5, batch)
    width = math.prod(int(settings[key]) for key in family.SIZES.width)
    tokens = family.SIZES.tokens(config, config.shapes.largest, models.decoders.factor(autoencoder))
    return alive.peak / SAMPLES / 2 / tokens / width


@torch.no_grad()
def decoding(name: str) -> tuple[int, float]:
    """Parameters of the autoencoder, and the peak bytes per pixel of decoding an image in bfloat16."""
    config, (_, settings) = model_shapes.configuration(name), model_shapes.PUBLISHED[name]
    kind: Any = (DECODERS | {"flux2_klein": AutoencoderKLFlux2}).get(config.family, AutoencoderKL)
    if kind is AutoencoderKLFlux2:
        settings = {"block_out_channels": settings["block_out_channels"]}
    with torch.device("meta"):
        decoder = kind(**{key: list(v) if isinstance(v, tuple) else v for key, v in settings.items()})
        decoder = decoder.to(torch.bfloat16).eval()
        factor = models.decoders.factor(decoder.config)
        cells = config.shapes.largest.height // factor, config.shapes.largest.width // factor
        channels = decoder.config.get("latent_channels") or decoder.config["z_dim"]
        frames = {AutoencoderKLQwenImage: (1,), AutoencoderKLWan: (LATENT_FRAMES,)}.get(kind, ())
        z = torch.empty(1, channels, *frames, *cells, dtype=torch.bfloat16)
    with Alive(decoder) as alive:
        decoder.decode(z, return_dict=False)[0].float()
    return sum(parameter.numel() for parameter in decoder.parameters()), alive.peak / config.shapes.largest.pixels


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(model_shapes.PUBLISHED))
    functional.scaled_dot_product_attention = one_kernel
    for name in parser.parse_args(argv).models:
        parameters, pixel = decoding(name)
        print(
            f"{name}: forward {forward_values(name):.1f} values per channel and token; autoencoder {parameters:,} "
            f"parameters, {pixel:.0f} bytes per pixel",
            flush=True,
        )


if __name__ == "__main__":
    main()
