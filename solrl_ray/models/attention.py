"""Selects the kernels that scaled dot-product attention may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solrl_ray.models.libraries import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""Attention kernels take a mask without padding it if the number of keys is a multiple of this."""


def choose_for_training(*, cudnn: bool = False) -> None:
    """Allow flash and memory-efficient kernels and plain matrix products in this process, and cuDNN's only if `cudnn`.

    With PyTorch 2.11 on an H200, training FLUX with cuDNN's attention ends in an illegal memory access. Its backward
    also fails on sm_100. SD3.5 and SANA train with it, 13 to 15 % faster than with flash. It is not available with
    deterministic algorithms. The switch is for the whole process, not a context around a forward, because gradient
    checkpointing runs forwards inside the backward pass.
    """
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def use(kernels: str) -> None:
    """Select the attention kernels of this name, which `kernels` returned earlier."""
    torch.backends.cuda.enable_cudnn_sdp(kernels == "cudnn")


def kernels() -> str:
    """Name of the fastest attention kernels that are currently allowed: ``cudnn`` or ``flash``. Compiled code keeps the
    kernels it was compiled with.
    """
    return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"


def is_memory_efficient() -> bool:
    """Whether attention with a mask currently uses memory-efficient kernels: flash has no masks, and cuDNN's kernels
    are not available with deterministic algorithms.
    """
    return kernels() == "flash" or torch.are_deterministic_algorithms_enabled()


def padded_text(sequence: Tensor, mask: Tensor, beside: int = 0) -> tuple[Tensor, Tensor]:
    """Pad a text [B, tokens, width] and its mask [B, tokens] with masked zero tokens, so that the number of tokens plus
    `beside` other tokens is a multiple of `ALIGNMENT`.

    Masked tokens have weight 0. Without this, memory-efficient attention pads the mask itself, and compiled blocks
    (PyTorch 2.11) then fail with "(*bias): last dimension must be contiguous".
    """
    missing = -(sequence.shape[1] + beside) % ALIGNMENT
    pad = torch.nn.functional.pad
    return pad(sequence, (0, 0, 0, missing)), pad(mask, (0, missing))
