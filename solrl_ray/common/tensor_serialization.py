"""How records with tensors cross to another process: as bytes that pickle passes out of band.

A tensor that is pickled as it is goes byte by byte through a storage of its own, several times slower than memory.
NumPy's arrays go by reference into Ray's object store (pickle protocol 5), in one copy on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # records without tensors, as they cross to `solrl status`, need neither
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A tensor on its way."""

    content: np.ndarray
    """uint8 [n]."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class Portable:
    """Base of dataclasses whose fields hold tensors, or dicts of tensors. They arrive equal, on the CPU, writable."""

    __slots__ = ()

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


def _decode(value: Any) -> Any:
    if isinstance(value, _Bytes):
        import torch

        tensor = torch.empty(value.shape, dtype=value.dtype)
        # A copy: what lies in the object store is shared and must not be written to.
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = value.content
        return tensor
    if isinstance(value, dict):
        return {key: _decode(entry) for key, entry in value.items()}
    return value


def _rebuild(kind: type, values: dict[str, Any]) -> Any:
    return kind(**{name: _decode(value) for name, value in values.items()})
