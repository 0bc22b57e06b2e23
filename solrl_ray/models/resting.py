"""Weights that leave a GPU while their worker rests, and return before its turn.

A tensor stays the same object; only the memory behind it changes. So modules, optimisers and compiled code are not
affected. Its address may change, which captured CUDA graphs would not survive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from solrl_ray.errors import RunError

_ALIGNED = 512
"""Bytes; each copy on the host begins at a multiple of this."""
_WORD = 8
"""Bytes of an int64, the unit of checksums."""


class _HostRoom:
    """Uninitialised host memory; if pinned, a GPU copies from and to it at the full speed of its link. PyTorch's own
    allocator of pinned memory would round the size up to a power of two.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        """Raises RunError if there is not enough memory."""
        reason = ""
        try:
            self.bytes = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            reason = "out of memory"
        else:
            runtime: Any = torch.cuda.cudart() if pinned and size else None
            address = self.bytes.data_ptr()
            error = int(runtime.cudaHostRegister(address, size, 0)) if runtime else 0
            reason = f"it cannot be pinned: CUDA error {error}" if error else ""
            if runtime and not error:  # else that address could not be pinned again
                weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
        if reason:
            raise RunError(
                f"{size / 1e9:.1f} GB of host memory for weights that are laid down cannot be allocated ({reason}); "
                "set fleet.sharing to keep, or give the node more memory"
            )


@dataclass(slots=True)
class _Piece:
    """Memory that is laid down as a whole; several tensors may be views of it."""

    storage: torch.UntypedStorage
    host: Tensor
    """uint8, as many bytes: the copy."""
    room: _HostRoom
    """The memory that holds it."""
    checksum: int


class RestingWeights:
    """What one worker lays down.

    The copies on the host are pinned if there is a GPU, and made once: unchanged data is not copied again.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}
        """By identity of the storage."""
        self._down: list[_Piece] = []

    @property
    def is_down(self) -> bool:
        return bool(self._down)

    @torch.no_grad()
    def lay_down(self, tensors: Iterable[Tensor], device: torch.device) -> int:
        """Return the memory behind tensors on a device to PyTorch's allocator; returns its bytes.

        The tensors must not be used until `take_up`. Tensors elsewhere, in memory that PyTorch did not allocate, or
        that only wrap others (Transformer Engine's) are left alone.
        """
        if self._down:
            return 0
        found = {storage._cdata: storage for storage in _storages(tensors) if storage.device == device}
        self._pieces = {key: piece for key, piece in self._pieces.items() if key in found}
        sums = dict(zip(found, _checksums(found.values()), strict=True))
        self._make_room({key: storage for key, storage in found.items() if key not in self._pieces})
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

    def _make_room(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Allocate one piece of host memory for all that have none yet."""
        starts, size = [], 0
        for storage in storages.values():
            starts.append(size)
            size += -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        room = _HostRoom(size, pinned=torch.cuda.is_initialized())
        for (key, storage), start in zip(storages.items(), starts, strict=True):
            self._pieces[key] = _Piece(storage, room.bytes[start : start + storage.nbytes()], room, checksum=-1)


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


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    """Return when pending work on their GPUs is done."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
