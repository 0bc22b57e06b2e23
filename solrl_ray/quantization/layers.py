"""What all quantised linears share: creation, storage, and updates in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from solrl_ray.quantization.formats import TENSORS, frozen_amax, pack
from solrl_ray.quantization.planning import Format


def allocate_(tensor: Tensor) -> None:
    """Give a freed tensor memory again, with any content; does nothing if it has memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())


def free_(tensor: Tensor) -> None:
    """Give a tensor's memory back, unless another library uses it as well (on a CPU, NumPy)."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


class QuantizedLinear(nn.Module, ABC):
    """Computes ``quantize(x) @ quantize(W).T + bias``; for sampling only, it has no gradient.

    What it stores is a function of the weight alone, so layers of equal `format` can exchange it whatever their tier.
    `load` writes into the same buffers, whose addresses never change unless they were freed: compiled code stays valid.
    """

    format: ClassVar[Format]
    bias_dtype: ClassVar[torch.dtype]
    in_features: int
    out_features: int
    bias: Tensor | None

    def __init__(self, tensors: Mapping[str, Tensor], bias: Tensor | None, in_features: int) -> None:
        """Copies the `tensors` of such a layer, on the layer's device."""
        super().__init__()
        names = TENSORS[self.format]
        self.in_features = in_features
        self.out_features = tensors[names[0]].shape[0]
        for name in names:
            self.register_buffer(name, tensors[name].clone())
        self.register_buffer("bias", None if bias is None else bias.detach().to(self.bias_dtype).clone())

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantises a linear as revision 0 publishes it: with its own frozen amax where the format has one.

        Raises ValueError: the weight has NaN or Inf.
        """
        amax = frozen_amax(linear.weight) if cls.format == "nvfp4" else None
        return cls(pack(cls.format, linear.weight, amax), linear.bias, linear.in_features)

    def tensors(self) -> dict[str, Tensor]:
        """The stored weight by the names of `formats`, in its canonical layout; not a copy if possible."""
        return {name: getattr(self, name) for name in TENSORS[self.format]}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the weight in place with another layer's `tensors`, from any device.

        Raises ValueError: other names, shapes or dtypes than this layer's.
        """
        held = self.tensors()
        if tensors.keys() != held.keys():
            raise ValueError(f"a weight of {sorted(tensors)} for a layer that stores {sorted(held)}")
        for name, tensor in tensors.items():
            given, own = (tuple(tensor.shape), tensor.dtype), (tuple(held[name].shape), held[name].dtype)
            if given != own:
                raise ValueError(f"{name} is {given[1]} {list(given[0])}, this layer's is {own[1]} {list(own[0])}")
        for buffer in self._weight_buffers():
            allocate_(buffer)
        self._write(tensors)

    def free(self) -> None:
        """Give the memory of the weight back. Before the next forward, `load` must follow."""
        for buffer in self._weight_buffers():
            free_(buffer)

    def _weight_buffers(self) -> list[Tensor]:
        """What `free` frees, and `load` fills again."""
        return [buffer for name, buffer in self.named_buffers() if name != "bias"]

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the buffers with checked tensors."""
        for name, buffer in self.tensors().items():
            buffer.copy_(tensors[name])

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] of any float type → [..., out_features] of the same type."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
