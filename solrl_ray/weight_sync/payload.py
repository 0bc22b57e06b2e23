"""A policy revision and what travels of it; ``docs/reference/revision-format.md`` has the format byte by byte.

A payload is a safetensors file with the revision's whole manifest and those of its tensors that its receiver needs,
each either raw, under its own name, or as a delta against the parent revision, as ``<name>.xor``: the exclusive or of
the tensor's bytes with its parent's, compressed with zstd. Under a frozen global scale an update changes few codes, so
that most bytes of the exclusive or are zero.

=================  ======================  =====================================================
name               dtype, shape            what it is
=================  ======================  =====================================================
``<m>.lora_A``     float32 [rank, in]      factors of the policy
``<m>.lora_B``     float32 [out, rank]
``<m>.<tensor>``   by the module's format  merged weight as explorers hold it (`quantization.formats`)
=================  ======================  =====================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import zstandard

from solrl_ray.weight_sync import container
from solrl_ray.weight_sync.checksums import DTYPES, Stamp, raw_bytes, stamp
from solrl_ray.weight_sync.container import Buffer, Unusable
from solrl_ray.weight_sync.manifest import Manifest, is_factor, module_of

WHAT = "the revision's payload"
DELTA_SUFFIX = ".xor"
LEVEL = 1
"""zstd's fastest usual level: runs of zeros need no search, and higher ones save little."""
THREADS = 8
"""At most, for deltas; no byte depends on their number."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Revision:
    """A whole revision. Tensors are on the CPU; nobody changes them."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Exactly those that the manifest states."""

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
    """What a receiver was sent: verified as far as that goes without the parent's tensors."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Those that were sent raw; views of the payload."""
    deltas: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensor name → zstd frame, uint8."""
    parent: str = ""
    """`Manifest.packed_digest` of the revision that the deltas are against; empty without deltas."""


def encode(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    deltas: Mapping[str, torch.Tensor] | None = None,
    *,
    parent: str = "",
) -> bytes:
    """The payload with the given part of a revision's tensors, and `deltas` against `parent`."""
    named = {name + DELTA_SUFFIX: frame for name, frame in (deltas or {}).items()}
    metadata = {"manifest": manifest.to_json()} | ({"parent": parent} if named else {})
    return container.write({**tensors, **named}, metadata)


def read(buffer: Buffer) -> Payload:
    """Reads a payload, refusing whatever is not exactly what was written.

    Raises:
        Unusable: naming the first tensor that is cut off, foreign or altered, or the manifest.
    """
    metadata, found = container.read(buffer, WHAT)
    manifest = Manifest.from_json(metadata.get("manifest", ""))
    deltas = {n.removesuffix(DELTA_SUFFIX): t for n, t in found.items() if n.endswith(DELTA_SUFFIX)}
    tensors = {n: t for n, t in found.items() if not n.endswith(DELTA_SUFFIX)}
    for name in sorted(deltas.keys() | tensors.keys()):
        if name not in manifest.tensors:
            raise Unusable(f"{WHAT} has tensor {name!r}, which its manifest does not state")
    check(manifest, tensors)
    if bool(deltas) != ("parent" in metadata):
        raise Unusable(f"{WHAT} has {len(deltas)} deltas and names {'a' if 'parent' in metadata else 'no'} parent")
    return Payload(manifest=manifest, tensors=tensors, deltas=deltas, parent=metadata.get("parent", ""))


def check(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `Unusable` naming the first tensor that does not have its stated checksum."""
    for name, tensor in sorted(tensors.items()):
        if manifest.tensors.get(name) != stamp(tensor):
            raise Unusable(f"tensor {name!r} of {WHAT} does not have the checksum its manifest states")


def deltas_between(new: Revision, old: Revision) -> dict[str, torch.Tensor]:
    """Deltas of the packed tensors of `new` for which they are smaller than the tensor itself."""
    names = [name for name in new.packed if name in old.tensors]
    frames = in_threads(lambda name: xor_frame(new.packed[name], old.tensors[name]), names)
    return {name: frame for name, frame in zip(names, frames, strict=True) if frame is not None}


def packed_from(
    payload: Payload, parent: Mapping[str, torch.Tensor], modules: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The packed tensors of `modules` that a payload carries, with deltas applied to the tensors of `parent`.

    Raises:
        Unusable: a delta that is damaged or was made against other tensors.
    """
    wanted = set(modules)
    found = {n: t for n, t in payload.tensors.items() if not is_factor(n) and module_of(n) in wanted}
    deltas = {name: frame for name, frame in payload.deltas.items() if module_of(name) in wanted}
    for name in deltas:
        if name not in parent:
            raise Unusable(f"the delta of tensor {name!r} is against a tensor that is not held here")

    def decoded(name: str) -> torch.Tensor:
        return from_xor_frame(deltas[name], parent[name], name, payload.manifest.tensors[name])

    return found | dict(zip(deltas, in_threads(decoded, deltas), strict=True))


def in_threads(work: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """`work` of each name, in order. zstd and the exclusive or leave Python's lock to others while they run."""
    with ThreadPoolExecutor(max_workers=min(THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, names))


def xor_frame(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """One zstd frame as uint8 [n], or None if the tensor itself is not larger, or is of another shape or type."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return None
    content = raw_bytes(new) ^ raw_bytes(old)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    if len(frame) >= content.nbytes:
        return None
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def from_xor_frame(frame: torch.Tensor, old: torch.Tensor, name: str, stated: Stamp) -> torch.Tensor:
    """The new tensor, on the CPU.

    Raises:
        Unusable: the frame is damaged, or `old` is not the tensor that it was made against: what results does not
        have the stamp that is `stated`.
    """
    parent = raw_bytes(old)
    compressed = raw_bytes(frame).data
    try:
        size = zstandard.frame_content_size(compressed)
        if size != parent.nbytes:  # before anything of that size is allocated
            raise Unusable(f"the delta of tensor {name!r} is of {size} bytes, the tensor of {parent.nbytes}")
        content = zstandard.ZstdDecompressor().decompress(compressed)
    except zstandard.ZstdError as error:
        raise Unusable(f"the delta of tensor {name!r} is damaged: {error}") from error
    mixed = torch.from_numpy(np.frombuffer(content, np.uint8) ^ parent)
    new = mixed.view(DTYPES[stated.dtype]).reshape(old.shape)
    if stamp(new) != stated:
        raise Unusable(f"the delta of tensor {name!r} does not lead to the checksum that the manifest states")
    return new
