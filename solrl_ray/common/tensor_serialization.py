"""Sends records with tensors to another process, as bytes that pickle passes out of band.

A tensor that is pickled directly is copied through its storage, several times slower than a memory copy. NumPy arrays
go into Ray's object store out of band (pickle protocol 5), with one copy on each side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # not needed for records without tensors, such as those of `solrl status`
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor while it is sent."""

    content: np.ndarray
    """uint8 [n]."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class Portable:
    """Base of dataclasses whose fields hold tensors, or dicts of tensors. Tensors arrive equal, on the CPU, writable.

    In a `read_only` class, received tensors are views of the object store, which saves copying gigabytes. They must not
    be written to.
    """

    __slots__ = ()
    _READ_ONLY: ClassVar[bool] = False

    def __init_subclass__(cls, *, read_only: bool = False, **others: Any) -> None:
        super().__init_subclass__(**others)
        if read_only:
            cls._READ_ONLY = True

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        values = {field.name: _encode(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return _rebuild, (type(self), values)


def _encode(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _Bytes(content, value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _encode(entry) for key, entry in value.items()}
    return value


def _decode(value: Any, *, read_only: bool) -> Any:
    if isinstance(value, _Bytes):
        import torch

        if read_only and value.content.size:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                return torch.frombuffer(value.content, dtype=value.dtype).reshape(value.shape)

        tensor = torch.empty(value.shape, dtype=value.dtype)
        # A copy, because the object store is shared and must not be written to.
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = value.content
        return tensor
    if isinstance(value, dict):
        return {key: _decode(entry, read_only=read_only) for key, entry in value.items()}
    return value


def _rebuild(kind: type[Portable], values: dict[str, Any]) -> Any:
    return kind(**{name: _decode(value, read_only=kind._READ_ONLY) for name, value in values.items()})


def to_host(
    tensors: Mapping[str, torch.Tensor], into: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Copy tensors of one dtype from a GPU in one transfer; returns views of one buffer. CPU tensors are not copied.

    `into`: a dict that keeps the buffer, under its only key. A later call with the same sizes overwrites it. This is
    several times as fast as new memory, whose pages do not exist yet.
    """
    import torch

    if not any(tensor.is_cuda for tensor in tensors.values()):
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
    kept = {} if into is None else into
    host = kept.setdefault("buffer", torch.empty(flat.shape, dtype=flat.dtype))
    parts = host.copy_(flat).split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, tensors.items(), strict=True)}
