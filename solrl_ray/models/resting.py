"""Weights that leave a GPU while their worker rests, and return before its turn.

A tensor stays the same object; only the memory behind it changes. So modules, optimisers and compiled code are not
affected. Its address may change, which captured CUDA graphs would not survive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from solrl_ray.errors import RunError
from solrl_ray.models.host_memory import Content, Found, Room, SharedRoom, SharedRooms

_ALIGNED = 512
"""Bytes; each copy on the host begins at a multiple of this."""
_WORD = 8
"""Bytes of an int64, the unit of checksums."""
_SHARED = 1 << 16
"""Bytes from which on a copy is shared with others."""
_COMPARED = 1 << 26
"""Bytes that are compared at once."""
K = TypeVar("K")
Storages = dict[int, torch.UntypedStorage]
"""By identity."""


@dataclass(slots=True)
class _Piece:
    """Memory that is laid down as a whole; several tensors may be views of it."""

    storage: torch.UntypedStorage
    host: Tensor
    """uint8, as many bytes: the copy."""
    room: Room
    """The memory that holds it."""
    checksum: int


class RestingWeights:
    """What one worker lays down.

    The copies on the host are pinned if there is a GPU, and made once: unchanged data is not copied again. What never
    changes is there once for all workers of a machine (`host_memory`).
    """

    def __init__(self, rooms: SharedRooms | None = None) -> None:
        """`rooms`: where copies of others are found; by default those of this machine and user."""
        self._rooms = rooms or SharedRooms()
        self._pieces: dict[int, _Piece] = {}
        """By identity of the storage."""
        self._down: list[_Piece] = []

    @property
    def is_down(self) -> bool:
        return bool(self._down)

    @torch.no_grad()
    def lay_down(
        self, tensors: Iterable[Tensor], device: torch.device, changing: Iterable[Tensor] | None = None
    ) -> int:
        """Return the memory behind tensors on a device to PyTorch's allocator; returns its bytes.

        The tensors must not be used until `take_up`. Tensors elsewhere, in memory that PyTorch did not allocate, or
        that only wrap others (Transformer Engine's) are left alone.

        Args:
            changing: those that will change, so that sharing a copy of them is in vain; all if not given.

        Raises:
            RunError: the host has not enough memory.
        """
        if self._down:
            return 0
        found = {storage._cdata: storage for storage in _storages(tensors) if storage.device == device}
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in found}
        sums = dict(zip(found, _checksums(found.values()), strict=True))
        new = {key: storage for key, storage in found.items() if key not in self._pieces}
        if changing is not None:
            own = {storage._cdata for storage in _storages(changing)}
            large = {k: storage for k, storage in new.items() if k not in own and storage.nbytes() >= _SHARED}
            self._share(large, sums)
        # What others may have is never written: who turns out to change has room of its own from then on.
        moved = [
            k for k, piece in self._pieces.items() if isinstance(piece.room, SharedRoom) and piece.checksum != sums[k]
        ]
        self._make_room({k: found[k] for k in found if k in moved or k not in self._pieces})
        for key, piece in self._pieces.items():
            if piece.checksum != sums[key]:
                piece.host.copy_(_bytes(piece.storage), non_blocking=True)
                piece.checksum = sums[key]
        _wait(found.values())
        self._down = list(self._pieces.values())
        for piece in self._down:
            piece.storage.resize_(0)
        return sum(piece.host.numel() for piece in self._down)

    @torch.no_grad()
    def take_up(self) -> int:
        """Bring back what was laid down, and verify it; returns its bytes.

        Raises:
            RunError: the bytes differ.
            torch.OutOfMemoryError: another process has the memory.
        """
        down = self._down
        for piece in down:
            piece.storage.resize_(piece.host.numel())
            _bytes(piece.storage).copy_(piece.host, non_blocking=True)
        if [piece.checksum for piece in down] != _checksums(piece.storage for piece in down):
            raise RunError("weights came back to the GPU altered; its memory is faulty")
        self._down = []
        return sum(piece.host.numel() for piece in down)

    def _share(self, storages: Storages, sums: dict[int, int]) -> None:
        """Use copies that others have, and make the rest for all."""
        contents = {key: (storage.nbytes(), sums[key]) for key, storage in storages.items()}
        pinned = torch.cuda.is_initialized()
        self._attach(storages, contents, self._rooms.find(set(contents.values()), pinned=pinned))
        firsts = {contents[key]: key for key in storages if key not in self._pieces}
        index, size = _places({content: content[0] for content in firsts})
        room = self._rooms.make(size, pinned=pinned) if firsts else None
        if room is None:
            return
        for content, key in firsts.items():
            _part(room, index[content], content[0]).copy_(_bytes(storages[key]), non_blocking=True)
        _wait(storages.values())
        self._attach(storages, contents, {content: Found(room, offset) for content, offset in index.items()})
        self._rooms.offer(room, index)

    def _attach(self, storages: Storages, contents: dict[int, Content], found: dict[Content, Found]) -> None:
        """Take copies as those of storages that have none and the same bytes."""
        for key, storage in storages.items():
            there = found.get(contents[key])
            if there is None or key in self._pieces:
                continue
            host = _part(there.room, there.offset, storage.nbytes())
            if _same(host, _bytes(storage)):
                self._pieces[key] = _Piece(storage, host, there.room, checksum=contents[key][1])

    def _make_room(self, storages: Storages) -> None:
        """Allocate one piece of host memory for all."""
        places, size = _places({key: storage.nbytes() for key, storage in storages.items()})
        room = Room(size, pinned=torch.cuda.is_initialized())
        for key, storage in storages.items():
            self._pieces[key] = _Piece(storage, _part(room, places[key], storage.nbytes()), room, checksum=-1)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Its weights and buffers."""
    yield from module.parameters()
    yield from module.buffers()


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and _has_memory(storage) and storage.resizable():
            yield storage


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return bool(storage.data_ptr())
    except RuntimeError:  # a wrapper's
        return False


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _checksums(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """The sum of each storage's words, modulo 2^64."""
    sums = []
    for storage in storages:
        content = _bytes(storage)
        whole = content.numel() // _WORD * _WORD
        sums.append(content[:whole].view(torch.int64).sum() + content[whole:].sum())
    return [int(each) for each in torch.stack(sums).tolist()] if sums else []


def _places(sizes: dict[K, int]) -> tuple[dict[K, int], int]:
    """Offsets in a room, and its size."""
    offsets, size = {}, 0
    for key, nbytes in sizes.items():
        offsets[key] = size
        size += -(-nbytes // _ALIGNED) * _ALIGNED
    return offsets, size


def _part(room: Room, offset: int, size: int) -> Tensor:
    return room.bytes[offset : offset + size]


def _same(host: Tensor, content: Tensor) -> bool:
    parts = zip(host.split(_COMPARED), content.split(_COMPARED), strict=True)
    return all(torch.equal(part.to(content.device), there) for part, there in parts)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """Return when pending work on their GPUs is done."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
