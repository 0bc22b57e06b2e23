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


@pytest.mark.parametrize("cudnn", [False, True])
def test_training_may_use_every_kernel_and_cudnns_only_if_it_may(all_backends: None, cudnn: bool) -> None:
    attention.choose_for_training(cudnn=cudnn)
    assert attention.kernels() == ("cudnn" if cudnn else "flash")
    enabled = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in BACKENDS}
    assert enabled == {"flash": True, "mem_efficient": True, "math": True, "cudnn": cudnn}
