"""A policy revision and its payloads: messages between processes of one run. Ray passes their tensors without a copy.

=================  ======================  =====================================================
name               dtype, shape            content
=================  ======================  =====================================================
``<m>.lora_A``     float32 [rank, in]      LoRA factors of the policy
``<m>.lora_B``     float32 [out, rank]
``<m>.<tensor>``   by the module's format  merged, quantised weight (`quantization.formats`)
=================  ======================  =====================================================

``<m>`` is the path of a module LoRA modifies.
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
    """A payload that its receiver cannot use: it is damaged, or lacks factors that the receiver needs. Another payload
    of the same revision may work.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Revision:
    """A whole revision. Tensors are on the CPU and must not be changed."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """All tensors of the manifest, or only its factors if no explorer needs packed weights."""

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """Name → LoRA factor, float32."""
        return {name: tensor for name, tensor in self.tensors.items() if is_factor(name)}

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """Name → tensor of a quantised weight."""
        return {name: tensor for name, tensor in self.tensors.items() if not is_factor(name)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload(Portable, read_only=True):
    """The part of a revision that one kind of receiver needs."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Tensors on the CPU. In the receiving process they are views of the object store: do not write to them."""

    @property
    def nbytes(self) -> int:
        """Total size of the tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def verify(self) -> None:
        """Compare every tensor with the manifest.

        Raises Unusable, naming the first tensor, in name order, that is unknown or altered.
        """
        for name, found in sorted(stamps(self.tensors).items()):
            if name not in self.manifest.tensors:
                raise Unusable(f"{self.manifest.name} came with tensor {name!r}, which its manifest does not state")
            if self.manifest.tensors[name] != found:
                raise Unusable(
                    f"tensor {name!r} of {self.manifest.name} was altered: its checksum is not the manifest's"
                )
