"""Which kernels scaled dot-product attention may use."""

from __future__ import annotations

import torch


def choose_for_training() -> None:
    """Let attention of this process run on flash or memory-efficient kernels, or on plain matrix products, and
    never on cuDNN's.

    With PyTorch 2.11 on an H200, training FLUX through cuDNN's attention ends in an illegal memory access; its
    backward fails on sm_100 as well. A switch of the whole process, not a context around a forward: with gradient
    checkpointing the backward pass runs forwards of its own.
    """
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
