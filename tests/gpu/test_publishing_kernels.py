"""On a GPU: weights are merged, packed and stamped to the bits of a CPU."""

import pytest
import torch

from solrl_ray.config.schema import Lora
from solrl_ray.policy.merge import merged_weight
from solrl_ray.quantization.formats import pack
from solrl_ray.quantization.planning import Format
from solrl_ray.weight_sync.checksums import stamp
from solrl_ray.weight_sync.publish import Publisher
from tests.support.tensors import randn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1024, 768, 32), (33, 130, 3)])
def test_a_merge_has_the_bits_of_the_cpu(dtype: torch.dtype, rows: int, columns: int, rank: int) -> None:
    base = (0.02 * randn(rows, columns, seed=1)).to(dtype)
    a, b = randn(rank, columns, seed=2), 1e-3 * randn(rows, rank, seed=3)
    merged = merged_weight(base.cuda(), a, b, 1.7)
    assert merged.is_cuda
    assert torch.equal(merged.cpu(), merged_weight(base, a, b, 1.7))
    for format in ("nvfp4", "fp8-row"):
        on_cpu = pack(format, merged.cpu())
        assert all(torch.equal(tensor.cpu(), on_cpu[name]) for name, tensor in pack(format, merged).items())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 1000, 2**18, 2**18 + 11, 3 * 2**20])
def test_a_stamp_is_the_same_wherever_the_tensor_lies(count: int) -> None:
    for tensor in (randn(count, seed=count), randn(count, seed=count).bfloat16(), torch.arange(count).to(torch.uint8)):
        assert stamp(tensor.cuda()) == stamp(tensor)
    grid = randn(count, 6, seed=1).bfloat16()
    assert stamp(grid.cuda().t()) == stamp(grid.t())


def test_a_rank_packs_on_the_gpu_what_it_packs_on_the_cpu_into_memory_that_it_uses_again() -> None:
    lora = Lora(rank=8, alpha=8.0, targets=["to_q"])
    base = {f"{i}.to_q": (0.02 * randn(256 * (1 + i % 2), 512, seed=i)).bfloat16() for i in range(12)}
    formats: dict[str, Format] = dict.fromkeys(base, "fp8-row")

    def factors(number: int) -> dict[str, torch.Tensor]:
        found = {}
        for i, (module, weight) in enumerate(base.items()):
            found[f"{module}.lora_A"] = randn(8, weight.shape[1], seed=100 + i)
            found[f"{module}.lora_B"] = 1e-5 * number * randn(weight.shape[0], 8, seed=200 + i)
        return found

    on_cpu = Publisher(base, lora, formats=formats)
    on_gpu = Publisher({module: weight.cuda() for module, weight in base.items()}, lora, formats=formats)
    buffers: dict[str, torch.Tensor] = {}
    places = []
    for number in range(3):
        expected = on_cpu.shard(number, factors(number))
        given = {name: factor.cuda() for name, factor in factors(number).items()}
        found = on_gpu.shard(number, given, buffers=buffers)
        assert (found.stamps, found.held) == (expected.stamps, expected.held)
        assert found.packed.keys() == expected.packed.keys()
        assert all(torch.equal(tensor, expected.packed[name]) for name, tensor in found.packed.items())
        places.append({name: tensor.data_ptr() for name, tensor in found.packed.items()})
    assert places[0] == places[1] == places[2]
