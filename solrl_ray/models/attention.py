"""Which kernels scaled dot-product attention may use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 16
"""Keys for a multiple of which an attention kernel takes a mask as it is."""


def choose_for_training(*, cudnn: bool = False) -> None:
    """Let attention of this process run on flash or memory-efficient kernels, or on plain matrix products, and on
    cuDNN's only if `cudnn`.

    With PyTorch 2.11 on an H200, training FLUX through cuDNN's attention ends in an illegal memory access; its
    backward fails on sm_100 as well. SD3.5 and SANA train on it, 13 to 15 % faster than on flash. Deterministic
    algorithms refuse it. A switch of the whole process, not a context around a forward: with gradient checkpointing
    the backward pass runs forwards of its own.
    """
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def kernels() -> str:
    """The fastest kernels that attention may use now: ``cudnn`` or ``flash``. Compiled code keeps those it was compiled
    with."""
    return "cudnn" if torch.backends.cuda.cudnn_sdp_enabled() else "flash"


def is_memory_efficient() -> bool:
    """Whether attention with a mask runs on memory-efficient kernels now: flash has no masks, and deterministic
    algorithms refuse cuDNN's."""
    return kernels() == "flash" or torch.are_deterministic_algorithms_enabled()


def padded_text(sequence: Tensor, mask: Tensor, beside: int = 0) -> tuple[Tensor, Tensor]:
    """Text [B, tokens, width] and its mask [B, tokens] with masked tokens of zeros, so that together with `beside`
    other tokens it is a multiple of `ALIGNMENT`.

    A token that is masked has weight 0. Memory-efficient attention would pad the mask by itself, and compiled blocks
    (PyTorch 2.11) then hand it one that it refuses: "(*bias): last dimension must be contiguous".
    """
    missing = -(sequence.shape[1] + beside) % ALIGNMENT
    return functional.pad(sequence, (0, 0, 0, missing)), functional.pad(mask, (0, missing))
