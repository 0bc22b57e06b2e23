"""How explorers may come to a revision's weights: packed bytes or their own merge."""

import pytest
import torch
from torch import nn

from solrl_ray.errors import RunError
from solrl_ray.quantization.scope import quantize_
from solrl_ray.weight_sync.manifest import Expected
from solrl_ray.weight_sync.publication import EXPLORER
from solrl_ray.weight_sync.receive import Receiver, bases_to_keep
from tests.support.weight_sync import QUERY, SCOPE, addresses, config, explorer, factors, model, publisher, sent

TIERS = ("nvfp4-emulated", "fp8")


def merging(tier: str = "nvfp4-emulated") -> tuple[nn.Module, Receiver]:
    """An explorer that keeps its base, to merge and quantise by itself."""
    net = model()
    kept = bases_to_keep(net, config(tier, "lora"), torch.device("cpu"))
    quantize_(net, tier, SCOPE, without_kernels=True)
    return net, Receiver(net, quantized_base=kept)


# Factors alone


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_explorers_that_merge_themselves_end_in_the_packed_bytes(tier: str, threads: int, own_threads: None) -> None:
    torch.set_num_threads(threads)
    net, receiver = merging(tier)
    held = addresses(net)
    for number in (1, 2):  # the second one is merged into the base, not into the first
        revision = publisher(tier=tier, mode="lora").build(number, factors(seed=number))
        bound, digest = receiver.apply(sent(revision, EXPLORER, "lora"))
    packed = explorer(tier)
    assert (bound, digest) == Receiver(packed).apply(sent(revision, EXPLORER, "packed"))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["explorer"]
    assert all(torch.equal(tensor, packed.state_dict()[name]) for name, tensor in net.state_dict().items())
    assert addresses(net) == held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_merges_to_the_packed_bytes_of_a_cpu() -> None:
    revision = publisher(mode="lora").build(3, factors())
    net = model().cuda()
    kept = bases_to_keep(net, config("nvfp4-emulated", "lora"), torch.device("cuda"))
    quantize_(net, "nvfp4-emulated", SCOPE)
    bound, digest = Receiver(net, quantized_base=kept).apply(sent(revision, EXPLORER, "lora"))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["explorer"]


def test_a_worker_whose_merge_comes_out_otherwise_is_not_trusted() -> None:
    net, _ = merging()
    spoiled = {QUERY: model().get_submodule(QUERY).weight.to(torch.bfloat16) * 1.01}
    receiver = Receiver(net, quantized_base=spoiled)
    with pytest.raises(RunError, match=r"attn\.to_q\.packed of revision-000001 differs here from the published one"):
        receiver.apply(sent(publisher(mode="lora").build(1, factors()), EXPLORER, "lora"))
