"""Which kernels of scaled dot-product attention a model may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solrl_ray.models.libraries import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""An attention kernel takes a mask unchanged if the number of keys is a multiple of this."""


def choose_for_training(*, cudnn: bool = False) -> None:
    """Let attention of this process use flash or memory-efficient kernels, or plain matrix products, and cuDNN's only
    if `cudnn`.

    With PyTorch 2.11 on an H200, training FLUX with cuDNN's attention ends in an illegal memory access; its backward
    also fails on sm_100. SD3.5 and SANA train on it, 13 to 15 % faster than on flash. Deterministic algorithms refuse
    it. The switch is for the whole process, not a context around a forward, because gradient checkpointing runs
    forwards inside the backward pass.
    """
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def use(kernels: str) -> None:
    """Let attention from now on use the kernels of this name, one that `kernels` returned."""
    torch.backends.cuda.enable_cudnn_sdp(kernels == "cudnn")


def kernels() -> str:
    """The fastest kernels that attention may use now: ``cudnn`` or ``flash``. Compiled code keeps its own."""
    return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"


def is_memory_efficient() -> bool:
    """Whether attention with a mask uses memory-efficient kernels now: flash has no masks, and deterministic algorithms
    refuse cuDNN's.
    """
    return kernels() == "flash" or torch.are_deterministic_algorithms_enabled()


def padded_text(sequence: Tensor, mask: Tensor, beside: int = 0) -> tuple[Tensor, Tensor]:
    """Text [B, tokens, width] and its mask [B, tokens], padded with masked zero tokens so that together with `beside`
    other tokens the length is a multiple of `ALIGNMENT`.

    A masked token has weight 0. Memory-efficient attention would pad the mask itself, and compiled blocks (PyTorch
    2.11) then fail with "(*bias): last dimension must be contiguous".
    """
    missing = -(sequence.shape[1] + beside) % ALIGNMENT
    pad = torch.nn.functional.pad
    return pad(sequence, (0, 0, 0, missing)), pad(mask, (0, missing))
