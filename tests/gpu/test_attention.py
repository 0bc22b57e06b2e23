"""On a GPU: training's attention, at FLUX's shapes, runs on no kernel of cuDNN, in the backward pass neither."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from solrl_ray.models import attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def operators() -> set[str]:
    """Names of all operators and kernels of one forward and backward of 24 heads over 1,152 tokens."""
    shape = (2, 24, 1152, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        scaled_dot_product_attention(q, k, v).square().mean().backward()
        torch.cuda.synchronize()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v) if x.grad is not None)
    return {event.key.lower() for event in recorded.key_averages()}


def test_training_attends_without_cudnn() -> None:
    attention.choose_for_training()
    names = operators()
    assert any("scaled_dot_product_flash_attention" in name for name in names)
    assert not any("cudnn" in name for name in names)
