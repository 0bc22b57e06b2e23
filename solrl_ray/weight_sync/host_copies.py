"""A learner rank's packed weights of its last revision on the host, against which it makes the next deltas.

From a GPU they come through pinned buffers, and deltas are made in threads, while the next layers are merged::

    GPU      merge, quantise, copy 0 │ merge, quantise, copy 1 │ …
    threads                          │ 0: exclusive or, zstd   │ 1 …

So 1.8 GB of mostly unchanged data never leave the rank. New pages cost more than the rest, so memory is reused between
revisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from solrl_ray.weight_sync import payload

Tensors = dict[str, torch.Tensor]


class HostCopies:
    def __init__(self) -> None:
        self._held: Tensors = {}
        self._revision: int | None = None
        """Revision of the copies; None if they are incomplete."""
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def of(self, revision: int, *, parent: int | None) -> Iterator[CopiesInTheMaking]:
        """Take the packed weights of `revision`, as deltas where that is smaller, if the held revision is `parent`.

        Overwrites the held copies, also if the block raises.
        """
        follows = parent is not None and self._revision == parent
        self._revision = None
        with payload.thread_pool() as threads:
            yield CopiesInTheMaking(threads, self._held, self._buffers, follows=follows)
        self._revision = revision


class CopiesInTheMaking:
    """Collects tensors inside a ``with`` block of `HostCopies.of`."""

    def __init__(self, threads: Executor, held: Tensors, buffers: list[torch.Tensor], *, follows: bool) -> None:
        """`follows`: whether to make deltas against the held copies."""
        self._threads, self._held, self._follows = threads, held, follows
        self._made: dict[str, Future[torch.Tensor | None]] = {}
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._buffers = buffers
        for buffer in buffers:
            self._free.put(buffer)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors of the next layer, which must not change any more."""
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                buffer = self._buffer(tensor.nbytes)
                arriving = _host_view(buffer, tensor)
                arriving.copy_(tensor, non_blocking=True)
                there = torch.cuda.Event()
                there.record(torch.cuda.current_stream(tensor.device))
                self._made[name] = self._threads.submit(self._arrived, name, arriving, buffer, there)
            else:
                self._made[name] = self._threads.submit(self._followed, name, tensor)

    def result(self) -> tuple[Tensors, Tensors]:
        """Whole tensors, and zstd frames, both by tensor name. From a GPU, the next revision overwrites the former."""
        frames = {name: made.result() for name, made in self._made.items()}
        whole = {name: self._held[name] for name, frame in frames.items() if frame is None}
        return whole, {name: frame for name, frame in frames.items() if frame is not None}

    def _followed(self, name: str, new: torch.Tensor) -> torch.Tensor | None:
        """A delta against the held copy, if there is one. `new` is then held instead."""
        old = self._held.get(name)
        self._held[name] = new
        return payload.xor_frame(new, old) if self._follows and old is not None else None

    def _arrived(
        self, name: str, new: torch.Tensor, buffer: torch.Tensor, there: torch.cuda.Event
    ) -> torch.Tensor | None:
        """As `_followed`, for content in a buffer that is reused."""
        try:
            there.synchronize()
            old = self._held.get(name)
            if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                self._held[name] = torch.empty(new.shape, dtype=new.dtype).copy_(new)
                return None
            frame = payload.xor_frame(new, old) if self._follows else None
            old.copy_(new)
            return frame
        finally:
            self._free.put(buffer)

    def _buffer(self, size: int) -> torch.Tensor:
        """Unused host memory, uint8 [at least `size`]; waits until a thread has finished with one."""
        if len(self._buffers) < payload.THREADS:
            self._buffers.append(payload.host_memory(size, pinned=True))
            return self._buffers[-1]
        found = self._free.get()
        if found.numel() < size:
            self._buffers[:] = [each for each in self._buffers if each is not found]
            found = payload.host_memory(size, pinned=True)
            self._buffers.append(found)
        return found


def _host_view(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype).reshape(like.shape)
