"""Sends records with tensors to another process: as bytes that pickle passes out of band.

A tensor pickled directly is copied byte by byte through its own storage, several times slower than memory. NumPy arrays
go by reference into Ray's object store (pickle protocol 5), with one copy on each side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # records without tensors, as `solrl status` gets, need neither
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
    """Base of dataclasses whose fields hold tensors, or dicts of tensors. They arrive equal, on the CPU, writable.

    Those of a `read_only` class are views of the object store, which saves copying gigabytes. They must not be written
    to.
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


def to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of one type; from a GPU in one copy, as views of one buffer. CPU tensors are returned as they are."""
    return on_its_way(tensors)()


def on_its_way(tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    """`to_host` in two steps: a copy on the GPU now, and what brings it to the host, from any thread, while the GPU
    computes other things.
    """
    import torch

    if not any(tensor.is_cuda for tensor in tensors.values()):
        found = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        return lambda: found
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    made = torch.cuda.Event()
    made.record()

    def bring() -> dict[str, torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream(flat.device)):
            made.wait()
            parts = flat.cpu().split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    return bring
