"""How explorers may come to a revision's weights: packed bytes, their own merge, the base pack."""

from pathlib import Path

import pytest
import torch
from torch import nn

from solrl_ray import models
from solrl_ray.config.checks import check
from solrl_ray.config.schema import Config, QuantizationScope
from solrl_ray.errors import RunError, UserError
from solrl_ray.quantization.planning import plan
from solrl_ray.quantization.scope import quantize_
from solrl_ray.weight_sync import base_pack
from solrl_ray.weight_sync.container import Unusable
from solrl_ray.weight_sync.manifest import Expected
from solrl_ray.weight_sync.publication import EXPLORER
from solrl_ray.weight_sync.receive import Receiver, quantized_bases
from tests.support import tiny
from tests.support.small import small_config
from tests.support.weight_sync import (
    LORA,
    QUERY,
    SCOPE,
    addresses,
    config,
    explorer,
    factors,
    model,
    publisher,
    sent,
)

TIERS = ("nvfp4-emulated", "fp8")


def merging(tier: str = "nvfp4-emulated") -> tuple[nn.Module, Receiver]:
    """An explorer that keeps its base, to merge and quantise by itself."""
    net = model()
    linears = {path: module for path, module in net.named_modules() if isinstance(module, nn.Linear)}
    kept = quantized_bases(net, LORA.targets, plan(linears, tier, SCOPE).tiers)
    quantize_(net, tier, SCOPE, without_kernels=True)
    return net, Receiver(net, quantized_base=kept)


# Factors alone


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_explorers_that_merge_themselves_end_in_the_packed_bytes(tier: str, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        net, receiver = merging(tier)
        held = addresses(net)
        for number in (1, 2):  # the second one is merged into the base, not into the first
            revision = publisher(tier=tier, mode="lora").build(number, factors(seed=number))
            bound, digest = receiver.apply(sent(revision, EXPLORER, "lora"))
    finally:
        torch.set_num_threads(before)
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
    kept = quantized_bases(net, LORA.targets, {QUERY: "nvfp4-emulated"})
    quantize_(net, "nvfp4-emulated", SCOPE)
    bound, digest = Receiver(net, quantized_base=kept).apply(sent(revision, EXPLORER, "lora"))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["explorer"]


def test_a_worker_whose_merge_comes_out_otherwise_is_not_trusted() -> None:
    net, _ = merging()
    spoiled = {QUERY: model().get_submodule(QUERY).weight.to(torch.bfloat16) * 1.01}
    receiver = Receiver(net, quantized_base=spoiled)
    with pytest.raises(RunError, match=r"attn\.to_q\.packed of revision-000001 differs here from the published one"):
        receiver.apply(sent(publisher(mode="lora").build(1, factors()), EXPLORER, "lora"))


# The base pack


def tiny_config(pipeline: Path, tier: str) -> Config:
    plain = config(tier)
    section = tiny.model_config(pipeline, quantization=QuantizationScope(skip=["norm", "embed", "^proj_out"]))
    return plain.model_copy(update={"model": section})


@pytest.mark.parametrize("tier", TIERS)
def test_an_explorer_from_the_base_pack_equals_one_quantised_from_the_checkpoint(
    tier: str, tiny_pipeline: Path
) -> None:
    settings = tiny_config(tiny_pipeline, tier)
    quantized = models.load(settings.model, "cpu", components={"transformer"}).transformer
    content = base_pack.write(quantized, settings)
    assert base_pack.write(quantized, settings, threads=3) == content
    wanted_report = quantize_(quantized, tier, settings.model.quantization, without_kernels=True)
    base = base_pack.read(content, settings)
    built = models.family(settings.model).skeleton(settings.model)
    report = base_pack.build(built, base, settings, torch.device("cpu"), without_kernels=True)
    assert report == wanted_report
    wanted = quantized.state_dict()
    assert built.state_dict().keys() == wanted.keys()
    assert all(
        torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype
        for name, tensor in built.state_dict().items()
    )
    assert not any(parameter.is_meta for parameter in built.parameters())
    # Neither weights nor buffers lie in the pack, which may be read-only memory.
    assert all(
        parameter.data_ptr() not in {t.data_ptr() for t in base.tensors.values()} for parameter in built.parameters()
    )


def test_a_base_pack_is_smaller_and_has_no_full_precision_weight_of_a_quantised_layer(tiny_pipeline: Path) -> None:
    settings = tiny_config(tiny_pipeline, "nvfp4-emulated")
    transformer = models.load(settings.model, "cpu", components={"transformer"}).transformer
    base = base_pack.read(base_pack.write(transformer, settings), settings)
    assert base.tiers
    assert not any(f"{path}.weight" in base.tensors for path in base.tiers)
    assert base.digest == base_pack.read(base_pack.write(transformer, settings), settings).digest


def test_a_base_pack_that_is_damaged_or_of_another_model_is_refused(tiny_pipeline: Path) -> None:
    settings = tiny_config(tiny_pipeline, "nvfp4-emulated")
    transformer = models.load(settings.model, "cpu", components={"transformer"}).transformer
    content = base_pack.write(transformer, settings)
    with pytest.raises(Unusable, match=r"the base pack of .* bytes is cut off inside tensor"):
        base_pack.read(content[:-1], settings)
    with pytest.raises(Unusable, match="of the base pack does not have the checksum"):
        base_pack.read(content[:-1] + bytes([content[-1] ^ 1]), settings)
    with pytest.raises(Unusable, match="another model, tier or scope"):
        base_pack.read(content, tiny_config(tiny_pipeline, "fp8"))
    with pytest.raises(RunError, match="the explorers quantise nothing"):
        base_pack.write(transformer, tiny_config(tiny_pipeline, "float32"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["publish.mode=lora"], 'publish.base is "pack".* must be checkpoint with publish.mode lora'),
        (["rollout.explore.precision=float32"], 'publish.base is "pack".* must be checkpoint, because the pool'),
    ],
)
def test_a_base_pack_that_nobody_could_use_is_refused(changes: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        check(small_config(tmp_path, "pack", "publish.base=pack", *changes))
