"""A learner chooses the kernels of its attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from solrl_ray.models import attention

BACKENDS = ("flash", "mem_efficient", "math", "cudnn")


@pytest.fixture
def all_backends() -> Iterator[None]:
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in BACKENDS]
    for name in BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    yield
    for name, enabled in zip(BACKENDS, before, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


def test_training_may_use_every_kernel_but_cudnns(all_backends: None) -> None:
    attention.choose_for_training()
    enabled = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in BACKENDS}
    assert enabled == {"flash": True, "mem_efficient": True, "math": True, "cudnn": False}
