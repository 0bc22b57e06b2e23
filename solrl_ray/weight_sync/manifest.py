"""The manifest of a policy revision: identity, formats of its weights, and the checksum of every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solrl_ray.config.schema import Lora
from solrl_ray.weight_sync.checksums import Stamp

Policy = Literal["old", "default", "ema", "base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a receiver must hold after it has applied a revision."""

    modules: int
    """LoRA-touched modules overwritten."""
    digest: str
    """`tensors_digest` of their buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of a policy. Equal revisions have equal manifests."""

    revision: int
    """Updates that made this policy."""
    policy: Policy
    """``old`` is the sampling policy; the others are published for evaluation only."""
    lora: Lora
    base_digest: str
    """`tensors_digest` of the touched modules' base weights."""
    formats: dict[str, str]
    """Path of each touched module that explorers quantise → its format, such as ``nvfp4``; the others are merged."""
    amax: dict[str, float]
    """Module path → frozen amax, which fixes the global scale; only for formats with one."""
    bumped: tuple[str, ...]
    """Modules that outgrew their frozen amax, which was doubled."""
    expected: dict[str, Expected]
    """By the receiver's role: ``explorer``, ``regenerator``."""
    tensors: dict[str, Stamp]
    """Every tensor of the revision, whether or not a payload contains it: ``<module>.lora_A``, …."""

    @property
    def name(self) -> str:
        """``revision-000020`` for the sampling policy, ``ema-000020`` for another one."""
        return f"{'revision' if self.policy == 'old' else self.policy}-{self.revision:06d}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that LoRA touches, sorted."""
        return tuple(sorted({module_of(name) for name in self.tensors if is_factor(name)}))


def is_factor(tensor: str) -> bool:
    """Whether the name is a LoRA factor's, not a packed weight's."""
    return tensor.endswith((".lora_A", ".lora_B"))


def module_of(tensor: str) -> str:
    """``blocks.0.to_q`` of ``blocks.0.to_q.lora_A``."""
    return tensor.rsplit(".", 1)[0]
