"""On a GPU: weights are merged, packed and stamped to the bits of a CPU."""

import pytest
import torch

from solrl_ray.config.schema import Lora
from solrl_ray.policy.merge import merged_weight
from solrl_ray.quantization.formats import pack
from solrl_ray.quantization.planning import Format
from solrl_ray.weight_sync.checksums import stamp
from solrl_ray.weight_sync.payload import Revision, applied
from solrl_ray.weight_sync.publish import Publisher, assemble

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def test_ranks_make_the_deltas_of_the_cpu_and_an_explorer_applies_them_on_the_gpu() -> None:
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
    live = on_cpu.build(0, factors(0)).packed
    layers = {name: tensor.cuda() for name, tensor in live.items()}
    revision: Revision | None = None
    for number in range(4):
        parent = number - 1 if number else None
        expected = on_cpu.shard(number, factors(number), parent=parent, keep=True)
        given = {name: factor.cuda() for name, factor in factors(number).items()}
        found = on_gpu.shard(number, given, parent=parent, keep=True)
        assert (found.stamps, found.held) == (expected.stamps, expected.held)
        for ours, theirs in ((found.deltas, expected.deltas), (found.packed, expected.packed)):
            assert ours.keys() == theirs.keys()
            assert all(not tensor.is_cuda and torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        assert bool(found.deltas) == bool(number)
        revision = assemble([found], lora, factors(number), revision)
        new = applied(found.deltas, layers, revision.manifest)
        assert all(tensor.is_cuda and stamp(tensor) == found.stamps[name] for name, tensor in new.items())
        layers |= new | {name: tensor.cuda() for name, tensor in found.packed.items()}
