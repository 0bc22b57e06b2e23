"""The manifest of a policy revision: identity, layout of its weights, and the checksum of every tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from solrl_ray.config.schema import Lora
from solrl_ray.quantization import nvfp4
from solrl_ray.weight_sync.checksums import Stamp
from solrl_ray.weight_sync.container import Unusable

FORMAT = "solrl-revision-3"
LAYOUT: dict[str, Any] = {
    "nvfp4_variant": nvfp4.VARIANT,
    "fp8_variant": "e4m3-power-of-two-rows",
    "nibble_order": "low-first",
    "swizzled": False,
}
"""Layout of packed weights, independent of a receiver's kernel, which rearranges them itself."""
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
    """One version of a policy. Equal revisions have equal manifests, byte for byte."""

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

    def to_json(self) -> str:
        """Canonical JSON with its own checksum: ``{"manifest": …, "sha256": …}``."""
        body = {"format": FORMAT, "layout": LAYOUT, **_MANIFEST.dump_python(self, mode="json")}
        return canonical({"manifest": body, "sha256": sha256(canonical(body))})

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises `Unusable` if it is unreadable, altered or of another format."""
        what = "the manifest of the revision"
        try:
            parsed = json.loads(text)
            body, stated = parsed["manifest"], parsed["sha256"]
            if sha256(canonical(body)) != stated:
                raise Unusable(f"{what} does not have the checksum it states")
            found = (body.get("format"), body.get("layout"))
            if found != (FORMAT, LAYOUT):
                raise Unusable(f"the revision is in format {found}, not {(FORMAT, LAYOUT)}")
            return _MANIFEST.validate_python(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Unusable(f"{what} is unreadable: {error}") from error

    def digest(self) -> str:
        """SHA-256 over the whole manifest, and through its checksums over the tensors."""
        return sha256(self.to_json())


_MANIFEST = TypeAdapter(Manifest)


def is_factor(tensor: str) -> bool:
    """Whether the name is a LoRA factor's, not a packed weight's."""
    return tensor.endswith((".lora_A", ".lora_B"))


def module_of(tensor: str) -> str:
    """``blocks.0.to_q`` of ``blocks.0.to_q.lora_A``."""
    return tensor.rsplit(".", 1)[0]


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
