"""A policy revision: an immutable record, its checksums, and its one-file form for the wire.

The wire form is a safetensors file whose metadata holds the manifest. Per touched module it has

=================  ======================  =====================================================
name               dtype, shape            what it is
=================  ======================  =====================================================
``<m>.lora_A``     float32 [rank, in]      factors of the policy
``<m>.lora_B``     float32 [out, rank]
``<m>.packed``     uint8 [out, K/2]        merged weight in NVFP4 (`nvfp4.NVFP4Tensor`), if explorers
``<m>.scales``     uint8 [out, K/16]       quantise this module; K is `in` padded to 32
``<m>.amax``       float32 []
``<m>.codes``      uint8 [out, in]         the same in FP8 (`quantization.fp8`), if explorers run that tier
``<m>.scale``      float32 [out]
=================  ======================  =====================================================

The manifest states the policy, the format (variant, nibble order), the LoRA scaling, the base it was merged
into, SHA-256 of every tensor, and what every receiver must end with. It carries its own checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import safetensors.torch
import torch

from solrl_ray.errors import RunError
from solrl_ray.quantization import nvfp4

FORMAT = "solrl-revision-1"
NIBBLE_ORDER = "low-first"
FACTORS = ("lora_A", "lora_B")
Policy = Literal["old", "default", "ema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a receiver must hold after it has taken a revision."""

    modules: int
    """LoRA-touched modules overwritten."""
    digest: str
    """`tensors_digest` of their buffers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Revision:
    """One version of a policy. Tensors are on the CPU; nobody changes them."""

    revision: int
    """Updates that made this policy."""
    parent: int | None
    """The revision before; None for the first."""
    policy: Policy = "old"
    """``old`` is the sampling policy; the others are published for evaluation only."""
    lora_rank: int
    lora_alpha: float
    targets: tuple[str, ...]
    """Module-name suffixes that LoRA was attached to."""
    base_digest: str
    """`tensors_digest` of the touched modules' base weights."""
    factors: dict[str, torch.Tensor]
    packed: dict[str, dict[str, torch.Tensor]]
    """Module path → merged weight as explorers hold it, by the names of `quantization.formats`."""
    bumped: tuple[str, ...] = ()
    """Modules that outgrew their frozen amax, which was doubled for them."""
    expected: dict[str, Expected]
    """By the receiver's role: ``explorer``, ``regenerator``."""

    @property
    def name(self) -> str:
        """``revision-000020`` for the sampling policy, ``ema-000020`` for another one."""
        return f"{'revision' if self.policy == 'old' else self.policy}-{self.revision:06d}"

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.lora_rank

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that LoRA touches, sorted."""
        return touched_modules(self.factors)

    def factor_tensors(self) -> dict[str, torch.Tensor]:
        return dict(sorted(self.factors.items()))

    def packed_tensors(self) -> dict[str, torch.Tensor]:
        """The packed weights as plain tensors, by the names of the wire form."""
        tensors: dict[str, torch.Tensor] = {}
        for module, weight in sorted(self.packed.items()):
            tensors.update(packed_buffers(module, weight))
        return tensors

    def manifest(self) -> str:
        """The manifest as canonical JSON: equal revisions have equal manifests, byte for byte."""
        tensors = self.factor_tensors() | self.packed_tensors()
        body: dict[str, Any] = {
            "format": FORMAT,
            "revision": self.revision,
            "parent": self.parent,
            "policy": self.policy,
            "variant": nvfp4.VARIANT,
            "nibble_order": NIBBLE_ORDER,
            "lora": {"rank": self.lora_rank, "alpha": self.lora_alpha, "targets": list(self.targets)},
            "base_digest": self.base_digest,
            "bumped": list(self.bumped),
            "expected": {role: asdict(expected) for role, expected in self.expected.items()},
            "tensors": {name: tensors_digest({name: tensor}) for name, tensor in tensors.items()},
        }
        return _canonical({"manifest": body, "sha256": _sha256(_canonical(body).encode())})

    def digest(self) -> str:
        """SHA-256 over everything a revision states and carries."""
        return _sha256(self.manifest().encode())

    def to_bytes(self) -> bytes:
        tensors = self.factor_tensors() | self.packed_tensors()
        return safetensors.torch.save(tensors, metadata={"manifest": self.manifest()})

    @classmethod
    def from_bytes(cls, payload: bytes) -> Revision:
        """Reads the wire form back, refusing whatever is not exactly what was written.

        Raises:
            RunError: naming the first tensor that is cut off, missing or altered, or the manifest.
        """
        manifest = _read_header(payload)
        return cls.from_parts(manifest, safetensors.torch.load(payload))

    @classmethod
    def from_parts(cls, manifest: str, tensors: Mapping[str, torch.Tensor]) -> Revision:
        """A revision from its manifest and tensors. Raises `RunError` as `from_bytes` does."""
        body = _read_manifest(manifest)
        _check_tensors(body["tensors"], tensors)
        packed: dict[str, dict[str, torch.Tensor]] = {}
        for name in sorted(tensors):
            module, _, kind = name.rpartition(".")
            if kind not in FACTORS:
                packed.setdefault(module, {})[kind] = tensors[name]
        lora = body["lora"]
        return cls(
            revision=body["revision"],
            parent=body["parent"],
            policy=body["policy"],
            lora_rank=lora["rank"],
            lora_alpha=lora["alpha"],
            targets=tuple(lora["targets"]),
            base_digest=body["base_digest"],
            factors={n: t for n, t in sorted(tensors.items()) if n.rpartition(".")[2] in FACTORS},
            packed=packed,
            bumped=tuple(body["bumped"]),
            expected={role: Expected(**expected) for role, expected in body["expected"].items()},
        )


def touched_modules(factors: Iterable[str]) -> tuple[str, ...]:
    """Module paths of factor names ``<module>.lora_A`` and ``<module>.lora_B``, sorted."""
    return tuple(sorted({name.rsplit(".", 1)[0] for name in factors}))


def packed_buffers(module: str, weight: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A packed weight's tensors by their names in a revision."""
    return {f"{module}.{name}": tensor for name, tensor in weight.items()}


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_header(payload: bytes) -> str:
    """The manifest in a safetensors file's metadata, after checking that no tensor is cut off."""
    start = 8 + int.from_bytes(payload[:8], "little")
    if len(payload) < max(start, 8):
        raise RunError(f"the revision's payload of {len(payload)} bytes is cut off inside its manifest")
    try:
        header = json.loads(payload[8:start])
        manifest = header.pop("__metadata__")["manifest"]
        ends = {name: entry["data_offsets"][1] for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"the manifest of the revision's payload is unreadable: {error}") from error
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if start + end > len(payload):
            raise RunError(f"the revision's payload of {len(payload)} bytes is cut off inside tensor {name!r}")
    if len(payload) != start + max(ends.values(), default=0):
        raise RunError(f"the revision's payload of {len(payload)} bytes is longer than its manifest says")
    return str(manifest)


def _read_manifest(manifest: str) -> dict[str, Any]:
    try:
        parsed = json.loads(manifest)
        body, stated = parsed["manifest"], parsed["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"the manifest of the revision is unreadable: {error}") from error
    if _sha256(_canonical(body).encode()) != stated:
        raise RunError("the manifest of the revision does not have the checksum it states")
    found = (body["format"], body["variant"], body["nibble_order"])
    if found != (FORMAT, nvfp4.VARIANT, NIBBLE_ORDER):
        raise RunError(f"the revision is in format {found}, not {(FORMAT, nvfp4.VARIANT, NIBBLE_ORDER)}")
    return dict(body)


def _check_tensors(stated: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    for name in sorted(stated.keys() | tensors.keys()):
        if name not in tensors:
            raise RunError(f"the revision lacks tensor {name!r}, which its manifest states")
        if stated.get(name) != tensors_digest({name: tensors[name]}):
            raise RunError(f"tensor {name!r} of the revision does not have the checksum its manifest states")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
