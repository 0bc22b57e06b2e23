"""A policy revision and its payloads; ``docs/reference/revision-format.md`` has the format byte by byte.

A payload is a safetensors file with the revision's whole manifest and the tensors that its receiver needs, each either
raw, under its own name, or as a delta against the parent revision, as ``<name>.xor``: the exclusive or of the tensor's
bytes with its parent's, compressed with zstd. Under a frozen global scale an update changes few codes, so that most
bytes of the exclusive or are zero.

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
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import zstandard

from solrl_ray.common import safetensors_file
from solrl_ray.common.safetensors_file import DTYPES
from solrl_ray.weight_sync import container
from solrl_ray.weight_sync.checksums import Stamp, raw_bytes, stamp
from solrl_ray.weight_sync.container import Buffer, Unusable
from solrl_ray.weight_sync.manifest import Manifest, is_factor, module_of

WHAT = "the revision's payload"
DELTA_SUFFIX = ".xor"
LEVEL = 1
"""zstd's fastest usual level: runs of zeros need no search, and higher levels save little."""
THREADS = 8
"""Maximum, for deltas; does not affect the bytes."""

AHEAD = 2 * THREADS
"""Frames decompressed ahead; more would only take memory."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Revision:
    """A whole revision. Tensors are on the CPU and must not be changed."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    """Those of the manifest, or its factors alone if no explorer needs more. For a revision that came as deltas,
    `FollowingTensors`.
    """
    deltas: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensor name → zstd frame: its form as it came from the learners, against the revision before."""

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """LoRA factors by name, float32."""
        return {name: self.tensors[name] for name in self.tensors if is_factor(name)}

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """Tensors of the quantised weights by name."""
        return {name: self.tensors[name] for name in self.packed_names}

    @property
    def packed_names(self) -> list[str]:
        """Names of the quantised weights' tensors."""
        return [name for name in self.tensors if not is_factor(name)]


class FollowingTensors(Mapping[str, torch.Tensor]):
    """Tensors of a revision, some of which came as deltas.

    The deltas are applied when the first of their tensors is read: explorers that hold the revision before are sent the
    deltas and need not wait for that.
    """

    def __init__(
        self,
        at_hand: Mapping[str, torch.Tensor],
        deltas: Mapping[str, torch.Tensor],
        parent: Mapping[str, torch.Tensor],
        manifest: Manifest,
    ) -> None:
        """`at_hand`: tensors that came whole; `parent`: tensors of the revision before."""
        self._at_hand, self._deltas, self._manifest = dict(at_hand), dict(deltas), manifest
        self._names = sorted(self._at_hand.keys() | self._deltas.keys())
        self._parent: Mapping[str, torch.Tensor] | None = parent
        self._applying = threading.Lock()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises `Unusable` if the deltas do not lead to the manifest's tensors."""
        if name in self._deltas:
            self._apply()
        return self._at_hand[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _apply(self) -> None:
        with self._applying:
            if self._parent is not None:
                parent = {name: self._parent[name] for name in self._deltas}
                self._at_hand |= applied(self._deltas, parent, self._manifest)
                self._parent = None  # else every revision would stay in memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Payload:
    """A received payload, verified as far as possible without the parent's tensors."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    """Raw tensors; views of the payload."""
    deltas: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensor name → zstd frame, uint8."""
    parent: str = ""
    """`Manifest.packed_digest` of the deltas' parent revision; empty without deltas."""


def encode(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    deltas: Mapping[str, torch.Tensor] | None = None,
    *,
    parent: str = "",
) -> bytes:
    """The payload with the given part of a revision's tensors, and `deltas` against `parent`."""
    return b"".join(pieces(manifest, tensors, deltas, parent=parent))


def pieces(
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    deltas: Mapping[str, torch.Tensor] | None = None,
    *,
    parent: str = "",
) -> list[bytes | memoryview]:
    """`encode` as consecutive pieces, without a copy."""
    named = {name + DELTA_SUFFIX: frame for name, frame in (deltas or {}).items()}
    metadata = {"manifest": manifest.to_json()} | ({"parent": parent} if named else {})
    return safetensors_file.pieces({**tensors, **named}, metadata)


def read(buffer: Buffer) -> Payload:
    """Reads and verifies a payload.

    Raises:
        Unusable: naming the first tensor that is truncated, unknown or altered, or the manifest.
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
    """Raises `Unusable` naming the first tensor with a wrong checksum."""
    for name, tensor in sorted(tensors.items()):
        if manifest.tensors.get(name) != stamp(tensor):
            raise Unusable(f"tensor {name!r} of {WHAT} does not have the checksum its manifest states")


def deltas_between(new: Revision, old: Revision) -> dict[str, torch.Tensor]:
    """Deltas of those packed tensors of `new` for which they are smaller. zstd and the exclusive or release Python's
    lock.
    """
    names = [name for name in new.packed_names if name in old.tensors]
    with thread_pool() as threads:
        frames = list(threads.map(lambda name: xor_frame(new.tensors[name], old.tensors[name]), names))
    return {name: frame for name, frame in zip(names, frames, strict=True) if frame is not None}


def packed_from(
    payload: Payload, parent: Mapping[str, torch.Tensor], modules: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The packed tensors of `modules` in a payload, with deltas applied to the tensors of `parent`.

    Raises:
        Unusable: a delta that is damaged or was made against other tensors.
    """
    wanted = set(modules)
    found = {n: t for n, t in payload.tensors.items() if not is_factor(n) and module_of(n) in wanted}
    deltas = {name: frame for name, frame in payload.deltas.items() if module_of(name) in wanted}
    for name in deltas:
        if name not in parent:
            raise Unusable(f"the delta of tensor {name!r} is against a tensor that is not held here")

    return found | applied(deltas, parent, payload.manifest)


def applied(
    deltas: Mapping[str, torch.Tensor], parent: Mapping[str, torch.Tensor], manifest: Manifest
) -> dict[str, torch.Tensor]:
    """The tensors that result from deltas, each on the device of its parent.

    Frames are decompressed in threads. On a GPU the rest is done there, one by one, without copying tensors to the
    host.

    Raises:
        Unusable: as `packed_from`.
    """

    def decoded(name: str) -> torch.Tensor:
        content = content_of(deltas[name], parent[name], name)
        return content if parent[name].is_cuda else moved(content, parent[name], name, manifest.tensors[name])

    found: dict[str, torch.Tensor] = {}
    for name, tensor in _in_order(decoded, deltas):
        old = parent[name]
        found[name] = moved(tensor, old, name, manifest.tensors[name]) if old.is_cuda else tensor
    return found


def _in_order(work: Callable[[str], T], names: Iterable[str]) -> Iterator[tuple[str, T]]:
    """Each name and its `work`, done in threads, at most AHEAD of them in advance."""
    begun: deque[tuple[str, Future[T]]] = deque()
    with thread_pool() as threads:
        for name in names:
            begun.append((name, threads.submit(work, name)))
            if len(begun) > AHEAD:
                first, done = begun.popleft()
                yield first, done.result()
        for name, done in begun:
            yield name, done.result()


def thread_pool() -> Executor:
    """For work on single tensors."""
    return ThreadPoolExecutor(max_workers=min(THREADS, os.cpu_count() or 1))


def xor_frame(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """One zstd frame as uint8 [n], or None if the tensor itself is not larger, or has another shape or type."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return None
    one, other = raw_bytes(new), raw_bytes(old)
    content = np.bitwise_xor(one, other, out=_scratch(one.nbytes))
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    if len(frame) >= content.nbytes:
        return None
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy())


def _scratch(size: int) -> np.ndarray:
    """Reused memory of this thread, uint8 [size]: new pages for each tensor would be slower than the exclusive or."""
    room: np.ndarray | None = getattr(_THREAD, "room", None)
    if room is None or room.nbytes < size:
        room = _THREAD.room = np.empty(size, np.uint8)
    return room[:size]


_THREAD = threading.local()


def content_of(frame: torch.Tensor, old: torch.Tensor, name: str) -> torch.Tensor:
    """The content of a frame, uint8 [n] on the CPU: an exclusive or with `old`. Raises `Unusable` if it is damaged."""
    compressed = raw_bytes(frame).data
    try:
        size = zstandard.frame_content_size(compressed)
        if size != old.nbytes:  # before such a size is allocated
            raise Unusable(f"the delta of tensor {name!r} is of {size} bytes, the tensor of {old.nbytes}")
        # PyTorch reuses pinned memory, and a GPU copies from it at the full speed of its link.
        content = host_memory(size, pinned=old.is_cuda)
        with zstandard.ZstdDecompressor().stream_reader(compressed) as reader:
            if reader.readinto(content.numpy().data) != size or reader.read(1):
                raise Unusable(f"the delta of tensor {name!r} is damaged: it ends too early or too late")
    except zstandard.ZstdError as error:
        raise Unusable(f"the delta of tensor {name!r} is damaged: {error}") from error
    return content


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Host memory, uint8 [size]; not pinned if the system refuses that, which is only slower."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size, dtype=torch.uint8)


def moved(content: torch.Tensor, old: torch.Tensor, name: str, stated: Stamp) -> torch.Tensor:
    """The tensor that results from `old` and a frame's `content`, on its device. Raises `Unusable` if it differs from
    `stated`.
    """
    held = old.detach().contiguous().reshape(-1).view(torch.uint8)
    new = (
        torch.bitwise_xor(content.to(held.device, non_blocking=True), held)
        .view(DTYPES[stated.dtype])
        .reshape(old.shape)
    )
    if stamp(new) != stated:
        raise Unusable(f"the delta of tensor {name!r} does not lead to the checksum that the manifest states")
    return new
