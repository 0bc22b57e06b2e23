"""Base class of quantised linears: creation, storage, and updates in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from solrl_ray.quantization.formats import TENSORS, frozen_amax, pack
from solrl_ray.quantization.planning import Format


def allocate_(tensor: Tensor) -> None:
    """Allocate memory for a freed tensor, with undefined content; does nothing if it has memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())


def free_(tensor: Tensor) -> None:
    """Free a tensor's memory, unless another library also uses it (on a CPU, NumPy)."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


class QuantizedLinear(nn.Module, ABC):
    """Computes ``quantize(x) @ quantize(W).T + bias``. For sampling only: it has no gradient.

    The stored tensors depend only on the weight, so layers with the same `format` can exchange them, whatever their
    tier. `load` writes into the existing buffers. Their addresses change only if they were freed, so compiled code
    stays valid.
    """

    format: ClassVar[Format]
    bias_dtype: ClassVar[torch.dtype]
    in_features: int
    out_features: int
    bias: Tensor | None

    def __init__(self, tensors: Mapping[str, Tensor], bias: Tensor | None, in_features: int) -> None:
        """Copies `tensors`, the stored weight of a layer of this format; they must be on the layer's device."""
        super().__init__()
        names = TENSORS[self.format]
        self.in_features = in_features
        self.out_features = tensors[names[0]].shape[0]
        for name in names:
            self.register_buffer(name, tensors[name].clone())
        self.register_buffer("bias", None if bias is None else bias.detach().to(self.bias_dtype).clone())

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantises a linear as in revision 0, with the frozen amax of its weight if the format has one.

        Raises ValueError if the weight has NaN or Inf.
        """
        amax = frozen_amax(linear.weight) if cls.format == "nvfp4" else None
        return cls(pack(cls.format, linear.weight, amax), linear.bias, linear.in_features)

    def tensors(self) -> dict[str, Tensor]:
        """Name (as in `formats`) → stored tensor in the canonical layout; not a copy if possible."""
        return {name: getattr(self, name) for name in TENSORS[self.format]}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the weight in place with another layer's `tensors`, from any device.

        Raises ValueError if names, shapes or dtypes differ from this layer's.
        """
        held = self.tensors()
        if tensors.keys() != held.keys():
            raise ValueError(f"a weight has the tensors {sorted(tensors)}, but the layer stores {sorted(held)}")
        for name, tensor in tensors.items():
            given, own = (tuple(tensor.shape), tensor.dtype), (tuple(held[name].shape), held[name].dtype)
            if given != own:
                raise ValueError(f"{name} is {given[1]} {list(given[0])}, but this layer's is {own[1]} {list(own[0])}")
        for buffer in self._weight_buffers():
            allocate_(buffer)
        self._write(tensors)

    def free(self) -> None:
        """Free the memory of the weight. Call `load` before the next forward."""
        for buffer in self._weight_buffers():
            free_(buffer)

    def _weight_buffers(self) -> list[Tensor]:
        """The buffers that `free` frees and `load` fills again."""
        return [buffer for name, buffer in self.named_buffers() if name != "bias"]

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the buffers with tensors that `load` has checked."""
        for name, buffer in self.tensors().items():
            buffer.copy_(tensors[name])

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], any float type → [..., out_features], same type."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
