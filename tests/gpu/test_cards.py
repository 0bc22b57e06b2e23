"""On a GPU: one process for all roles of a card gives the bits of one process a role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from tests.gpu.test_runs import EACH_A_CARD, IN_FP8, ONE_CARD, has_fp8, trained
from tests.support.small import digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("one_gpu_counted_as_four"),
    pytest.mark.timeout(900),  # a test has several runs, whose workers each load CUDA
]


@pytest.fixture(scope="module")
def one_gpu_counted_as_four() -> Iterator[None]:
    """A local Ray that gives each of four workers a whole GPU, which is the same one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        ray.init(address="local", num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
        yield
        ray.shutdown()


@has_fp8
def test_a_card_ends_with_the_bytes_of_a_process_a_role_also_if_frozen_weights_leave_it(tmp_path: Path) -> None:
    split = trained(tmp_path, "split", *EACH_A_CARD, *IN_FP8, "fleet.encoders={num_gpus: 1}")
    for offload in ("false", "true"):
        card = trained(tmp_path, f"offload-{offload}", *ONE_CARD, *IN_FP8, f"fleet.offload={offload}")
        assert digests(card) == digests(split), offload
