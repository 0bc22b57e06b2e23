"""Weights that are laid down leave the GPU free for others, and come back to the same bits without a compilation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from solrl_ray.models.host_memory import SharedRoom, SharedRooms
from solrl_ray.models.resting import RestingWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDTH, LAYERS = 8192, 8


@torch.no_grad()
def test_compiled_code_finds_the_same_bits_and_others_the_memory() -> None:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    model.compile(fullgraph=True)
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    before = model(x)
    tensors, resting = list(model.parameters()), RestingWeights()
    size = sum(tensor.nbytes for tensor in tensors)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        assert resting.lay_down(tensors, torch.device("cuda", 0)) == size
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= free + size * 0.99
        in_between = torch.ones(size // 2, device="cuda", dtype=torch.bfloat16)  # so that addresses are others'
        resting.take_up()
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(model(x), before)
        del in_between
    moved = next(iter(resting._pieces.values())).host
    assert moved.is_pinned()


@torch.no_grad()
def test_host_memory_that_is_free_again_can_be_pinned_again() -> None:
    device = torch.device("cuda", 0)
    for _ in range(3):  # the host gives the same addresses again
        tensors = [torch.ones(2**28, device=device)]
        resting = RestingWeights()
        resting.lay_down(tensors, device)
        resting.take_up()
        assert tensors[0].sum() == 2**28


@torch.no_grad()
def test_a_copy_that_two_workers_share_is_pinned_for_both(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    workers = [(RestingWeights(SharedRooms(tmp_path)), [torch.ones(2**28, device=device)]) for _ in range(2)]
    for resting, tensors in workers:
        resting.lay_down(tensors, device, changing=())
    first, second = (next(iter(resting._pieces.values())) for resting, _ in workers)
    assert isinstance(first.room, SharedRoom)
    assert isinstance(second.room, SharedRoom)
    assert os.fstat(first.room.descriptor).st_ino == os.fstat(second.room.descriptor).st_ino
    assert first.host.is_pinned()
    assert second.host.is_pinned()
    for resting, tensors in workers:
        resting.take_up()
        assert tensors[0].sum() == 2**28
