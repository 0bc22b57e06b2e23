"""The manifest of a policy revision: its identity, the formats of its weights, and the checksum of every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solrl_ray.config.schema import Lora
from solrl_ray.weight_sync.checksums import Stamp

Policy = Literal["old", "default", "ema", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The weights a receiver must hold after it applied a revision."""

    modules: int
    """Number of overwritten modules that LoRA modifies."""
    digest: str
    """`tensors_digest` of the buffers of these modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of a policy. Equal revisions have equal manifests."""

    revision: int
    """Number of updates that led to this policy."""
    policy: Policy
    """``old`` is the sampling policy; the others are published for evaluation only."""
    lora: Lora
    base_digest: str
    """`tensors_digest` of the base weights of the modules LoRA modifies."""
    formats: dict[str, str]
    """Path of each module that LoRA modifies and explorers quantise → its format, such as ``nvfp4``. The other modified
    modules are merged without quantisation.
    """
    amax: dict[str, float]
    """Module path → amax, which fixes the global scale; only for formats that have one."""
    bumped: tuple[str, ...]
    """Modules whose weights outgrew their frozen amax, which was doubled until they fit."""
    expected: dict[str, Expected]
    """Role of the receiver (``explorer``, ``regenerator``) → expected weights."""
    tensors: dict[str, Stamp]
    """Name of each tensor of the revision (``<module>.lora_A``, …) → its stamp. A payload may lack some of them."""

    @property
    def name(self) -> str:
        """``revision-000020`` for the sampling policy, ``ema-000020`` for another one."""
        return f"{'revision' if self.policy == 'old' else self.policy}-{self.revision:06d}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules LoRA modifies, sorted."""
        return tuple(sorted({module_of(name) for name in self.tensors if is_factor(name)}))


def is_factor(tensor: str) -> bool:
    """Whether this is the name of a LoRA factor, not of a packed weight."""
    return tensor.endswith((".lora_A", ".lora_B"))


def module_of(tensor: str) -> str:
    """The module's path in a tensor name: ``blocks.0.to_q`` for ``blocks.0.to_q.lora_A``."""
    return tensor.rsplit(".", 1)[0]
