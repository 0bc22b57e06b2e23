"""A policy revision and its payloads: messages between processes of one run, whose tensors Ray passes without a copy.

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

from solrl_ray.common.tensor_serialization import Portable
from solrl_ray.errors import RunError
from solrl_ray.weight_sync.checksums import stamps
from solrl_ray.weight_sync.manifest import Manifest, is_factor


class Unusable(RunError):
    """A payload that its receiver cannot use, though another one of the same revision may do: damaged, or without the
    factors that the receiver lacks.
    """


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
class Payload(Portable, read_only=True):
    """The part of a revision that one kind of receiver needs."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """On the CPU; after the journey views of the object store, which must not be written to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def verify(self) -> None:
        """Compare every tensor with the manifest.

        Raises Unusable: naming the first tensor, in name order, that is unknown or altered.
        """
        for name, found in sorted(stamps(self.tensors).items()):
            if name not in self.manifest.tensors:
                raise Unusable(f"{self.manifest.name} came with tensor {name!r}, which its manifest does not state")
            if self.manifest.tensors[name] != found:
                raise Unusable(f"tensor {name!r} of {self.manifest.name} is not as its manifest states: it was altered")
