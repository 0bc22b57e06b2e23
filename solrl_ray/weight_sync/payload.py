"""A policy revision and its payloads; ``docs/reference/revision-format.md`` has the format byte by byte.

A payload is a safetensors file with the revision's whole manifest and the tensors that its receiver needs.

=================  ======================  =====================================================
name               dtype, shape            what it is
=================  ======================  =====================================================
``<m>.lora_A``     float32 [rank, in]      factors of the policy
``<m>.lora_B``     float32 [out, rank]
``<m>.<tensor>``   by the module's format  merged weight as explorers hold it (`quantization.formats`)
=================  ======================  =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from solrl_ray.weight_sync import container
from solrl_ray.weight_sync.checksums import stamp
from solrl_ray.weight_sync.container import Buffer, Unusable
from solrl_ray.weight_sync.manifest import Manifest, is_factor

WHAT = "the revision's payload"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Revision:
    """A whole revision. Tensors are on the CPU and must not be changed."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """Those of the manifest, or its factors alone if no explorer needs more."""

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """LoRA factors by name, float32."""
        return {name: tensor for name, tensor in self.tensors.items() if is_factor(name)}

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """Tensors of the quantised weights by name."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_factor(name)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """A received payload, verified."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Views of what was received."""


def encode(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The payload with the given part of a revision's tensors."""
    return container.write(tensors, {"manifest": manifest.to_json()})


def read(buffer: Buffer) -> Payload:
    """Reads and verifies a payload.

    Raises Unusable: naming the first tensor that is truncated, unknown or altered, or the manifest.
    """
    metadata, tensors = container.read(buffer, WHAT)
    manifest = Manifest.from_json(metadata.get("manifest", ""))
    for name, tensor in sorted(tensors.items()):
        if name not in manifest.tensors:
            raise Unusable(f"{WHAT} has tensor {name!r}, which its manifest does not state")
        if manifest.tensors[name] != stamp(tensor):
            raise Unusable(f"tensor {name!r} of {WHAT} does not have the checksum its manifest states")
    return Payload(manifest=manifest, tensors=tensors)
