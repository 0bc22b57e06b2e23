"""Revisions: merged and quantised once, taken in place, and proved by receipts."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from solrl_ray.config.schema import Lora
from solrl_ray.errors import RunError
from solrl_ray.policy import adapters
from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Receipt
from solrl_ray.weight_sync.checksums import tensors_digest
from solrl_ray.weight_sync.manifest import Expected, Manifest, Policy
from solrl_ray.weight_sync.payload import Payload
from solrl_ray.weight_sync.publication import REGENERATOR
from solrl_ray.weight_sync.publish import Publisher, assemble, fitting_amax
from solrl_ray.weight_sync.receipts import ReceiptBook
from solrl_ray.weight_sync.receive import Receiver
from tests.support.weight_sync import (
    LORA,
    OUT,
    QUERY,
    SCOPE,
    addresses,
    config,
    explorer,
    factors,
    model,
    publisher,
    randn,
    same,
    sent,
)

# What is published


def test_a_merged_weight_is_quantised_once_from_one_rounding_to_bfloat16() -> None:
    revision = publisher().build(3, factors())
    f = {name: value.double().numpy() for name, value in factors().items()}
    base = model().get_submodule(QUERY).weight.to(torch.bfloat16).double().numpy()
    exact = base + 8.0 / 4 * (f[f"{QUERY}.lora_B"] @ f[f"{QUERY}.lora_A"])
    # numpy has no bfloat16: round the float64 to 8 significant bits, ties to even.
    mantissa, exponent = np.frexp(exact)
    rounded = np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)
    padded = np.pad(rounded, ((0, 0), (0, 16)))
    wanted = nvfp4.quantize(padded, amax=1.5 * float(np.abs(base).max()))
    assert torch.equal(revision.packed[f"{QUERY}.packed"], wanted.packed)
    assert torch.equal(revision.packed[f"{QUERY}.scales"], wanted.scales)
    assert float(revision.packed[f"{QUERY}.amax"]) == float(wanted.amax) == revision.manifest.amax[QUERY]
    assert revision.manifest.formats == {QUERY: "nvfp4"}  # the scope skips to_out


def test_the_bytes_of_a_revision_do_not_depend_on_the_number_of_threads(own_threads: None) -> None:
    wide = nn.ModuleDict({"to_q": nn.Linear(1024, 768)}).requires_grad_(False)
    wide["to_q"].weight.copy_(randn(768, 1024))
    lora = {"to_q.lora_A": randn(4, 1024, seed=1), "to_q.lora_B": randn(768, 4, seed=2)}
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        maker = Publisher.for_model(wide, config(lora=Lora(rank=4, alpha=3.0, targets=["to_q"])), tier="nvfp4-emulated")
        found.append(maker.build(1, lora))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_revision_zero_is_what_an_explorer_quantises_at_its_start() -> None:
    zero_b = {name: value * (0 if name.endswith("B") else 1) for name, value in factors().items()}
    revision = publisher().build(0, zero_b)
    fresh = explorer()
    assert torch.equal(fresh.get_submodule(QUERY).packed, revision.packed[f"{QUERY}.packed"])
    assert torch.equal(fresh.get_submodule(QUERY).scales, revision.packed[f"{QUERY}.scales"])
    assert float(fresh.get_submodule(QUERY).amax) == float(revision.packed[f"{QUERY}.amax"])


def test_attached_adapters_do_not_change_what_is_published() -> None:
    wrapped = model()
    adapters.attach(wrapped, LORA, run_seed=1)
    assert same(publisher(wrapped).build(2, factors()), publisher().build(2, factors()))


def test_the_scale_stays_frozen_until_a_weight_outgrows_it() -> None:
    small, smaller = publisher().build(1, factors(0.1)), publisher().build(2, factors(0.05))
    assert small.manifest.bumped == smaller.manifest.bumped == ()
    assert small.manifest.amax == smaller.manifest.amax
    large = publisher().build(3, factors(2.0))
    assert large.manifest.bumped == (QUERY,)
    growth = large.manifest.amax[QUERY] / small.manifest.amax[QUERY]
    assert growth > 1
    assert math.log2(growth).is_integer()


def test_a_bump_doubles_until_the_weight_fits() -> None:
    assert fitting_amax(1.5, torch.tensor([1.5])) == 1.5
    assert fitting_amax(1.5, torch.tensor([1.51])) == 3.0
    assert fitting_amax(1.5, torch.tensor([-13.0])) == 24.0
    assert fitting_amax(0.0, torch.tensor([0.25])) == 0.25


def test_not_finite_factors_are_not_published() -> None:
    bad = factors()
    bad[f"{QUERY}.lora_B"][0, 0] = float("nan")
    with pytest.raises(RunError, match=r"factor attn\.to_q\.lora_B has NaN or Inf"):
        publisher().build(1, bad)
    with pytest.raises(RunError, match=r"merged weight of attn\.to_out\.0 has NaN or Inf"):
        publisher().build(1, factors(1e25))


def test_factors_of_other_modules_are_refused() -> None:
    fewer = {name: value for name, value in factors().items() if OUT not in name}
    with pytest.raises(
        RunError, match=r"not those of the 2 modules that LoRA modifies; .*: \['attn\.to_out\.0\.lora_A'"
    ):
        publisher().build(1, fewer)


@pytest.mark.parametrize("policy", ["old", "ema"])
def test_ranks_that_share_the_work_make_the_bytes_of_one(policy: Policy) -> None:
    alone = publisher().build(4, factors(), policy=policy)
    for world_size in (2, 3):  # with three ranks one has nothing to do
        parts = [
            publisher().shard(4, factors(), policy=policy, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        together = assemble(parts, LORA, factors())
        assert same(together, alone)
    with pytest.raises(RunError, match=r"built \[\('old', 1\), \('old', 2\)\]"):
        assemble([publisher().shard(1, factors()), publisher().shard(2, factors())], LORA, factors())


def test_ranks_that_share_the_work_name_in_one_order_what_has_outgrown_its_scale() -> None:
    modules = ("a", "b", "c")  # two ranks have a and c, and b
    maker = Publisher({m: randn(32, 32) for m in modules}, LORA, formats=dict.fromkeys(modules, "nvfp4"))
    large = {f"{m}.lora_A": 9.0 * randn(LORA.rank, 32) for m in modules}
    large |= {f"{m}.lora_B": 9.0 * randn(32, LORA.rank) for m in modules}
    alone = maker.build(4, large).manifest
    assert alone.bumped == modules
    assert assemble([maker.shard(4, large, rank=rank, world_size=2) for rank in (0, 1)], LORA, large).manifest == alone


# Receivers


def test_an_explorer_ends_with_what_the_revision_states_at_the_same_addresses() -> None:
    net, revision = explorer(), publisher().build(5, factors())
    before = addresses(net)
    untouched = net["attn"].to_k.packed.clone()
    bound, digest = Receiver(net).apply(sent(revision))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["explorer"]
    assert bound == 2
    assert addresses(net) == before
    assert torch.equal(net["attn"].to_k.packed, untouched)


def test_a_receipt_is_of_what_the_layers_hold_and_not_of_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    net, revision = explorer(), publisher().build(5, factors())
    before = tensors_digest({f"{QUERY}.{name}": each for name, each in net.get_submodule(QUERY).tensors().items()})
    load = EmulatedNVFP4Linear.load

    def half_loaded(self: EmulatedNVFP4Linear, tensors: dict[str, torch.Tensor]) -> None:
        load(self, tensors)
        self.packed[0, 0] ^= 1

    monkeypatch.setattr(EmulatedNVFP4Linear, "load", half_loaded)
    bound, digest = Receiver(net).apply(sent(revision))
    assert bound == 2
    assert digest not in (before, revision.manifest.expected["explorer"].digest)


def test_a_receipt_is_of_what_a_linear_holds_if_that_rounds_what_was_merged() -> None:
    net, revision = model(torch.bfloat16), publisher().build(5, factors())
    base = {module: model().get_submodule(module).weight for module in (QUERY, OUT)}
    _, digest = Receiver(net, base=base).apply(sent(revision, REGENERATOR))
    held = {f"{module}.weight": net.get_submodule(module).weight for module in (QUERY, OUT)}
    assert digest == tensors_digest(held) != revision.manifest.expected["regenerator"].digest


def test_an_explorer_computes_with_the_merged_weight() -> None:
    net, merged = explorer(), model()
    Receiver(net).apply(sent(publisher().build(5, factors(0.3))))
    Receiver(merged).apply(sent(publisher().build(5, factors(0.3)), REGENERATOR))
    quantize_(merged, "nvfp4-emulated", SCOPE)
    x = randn(7, 48)
    # Only the frozen scale differs: the base's headroom in one, the merged weight's in the other.
    wanted, found = merged["attn"](x), net["attn"](x)
    assert torch.nn.functional.cosine_similarity(wanted.flatten(), found.flatten(), dim=0) > 0.98
    assert torch.nn.functional.cosine_similarity(wanted.flatten(), explorer()["attn"](x).flatten(), dim=0) < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_regenerator_ends_with_the_factors_merged_once(dtype: torch.dtype) -> None:
    net, revision = model(dtype), publisher(model(dtype)).build(5, factors())
    before = addresses(net)
    bound, digest = Receiver(net).apply(sent(revision, REGENERATOR))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["regenerator"]
    assert addresses(net) == before
    f = factors()
    exact = model(dtype).get_submodule(OUT).weight.double() + 2.0 * (
        f[f"{OUT}.lora_B"].double() @ f[f"{OUT}.lora_A"].double()
    )
    found = net.get_submodule(OUT).weight
    unit = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= unit * 1.0001 * exact.abs()).all()


def test_revisions_replace_and_do_not_add_up() -> None:
    net, maker = model(), publisher()
    receiver = Receiver(net)
    receiver.apply(sent(maker.build(1, factors(seed=90)), REGENERATOR))
    receiver.apply(sent(maker.build(2, factors()), REGENERATOR))
    once = model()
    Receiver(once).apply(sent(maker.build(2, factors()), REGENERATOR))
    assert torch.equal(net.get_submodule(QUERY).weight, once.get_submodule(QUERY).weight)


def test_an_unquantised_explorer_expects_merged_weights() -> None:
    revision = publisher(tier="float32").build(1, factors())
    assert revision.packed == {}
    assert revision.manifest.expected["explorer"] == revision.manifest.expected["regenerator"]


def test_the_average_is_published_for_regenerators_only() -> None:
    revision = publisher().build(4, factors(), policy="ema")
    assert revision.name == "ema-000004"
    assert revision.packed == {}
    assert set(revision.manifest.expected) == {"regenerator"}
    assert sent(revision, REGENERATOR).manifest.policy == "ema"


def test_a_revision_of_another_base_is_refused() -> None:
    other = model()
    other.get_submodule(QUERY).weight[0, 0] += 1
    with pytest.raises(RunError, match="other base weights"):
        Receiver(other).apply(sent(publisher().build(1, factors()), REGENERATOR))


def test_a_worker_that_holds_a_layer_otherwise_is_refused() -> None:
    unpacked = publisher(tier="float32").build(1, factors())
    with pytest.raises(RunError, match=r"does not pack attn\.to_q, which this worker holds quantised"):
        Receiver(explorer()).apply(sent(unpacked))
    packed = publisher().build(1, factors())
    with pytest.raises(RunError, match=r"packs attn\.to_q, which this worker holds unquantised"):
        Receiver(model()).apply(sent(packed))
    with pytest.raises(
        RunError, match=r"without the packed weight of attn\.to_q, whose base weight this worker did not keep"
    ):
        Receiver(explorer()).apply(sent(packed, REGENERATOR))
    with pytest.raises(RunError, match=r"does not fit attn\.to_q"):
        Receiver(explorer("fp8")).apply(sent(packed))


def test_modules_that_are_not_there_stop_the_worker() -> None:
    revision = publisher().build(1, factors())
    lacking = explorer()
    del lacking["attn"].to_q
    with pytest.raises(RunError, match=r"modifies attn\.to_q, which this worker's model lacks"):
        Receiver(lacking).apply(sent(revision))
    nothing = dataclasses.replace(revision.manifest, tensors={})
    with pytest.raises(RunError, match="modifies no module"):
        Receiver(explorer()).apply(Payload(manifest=nothing, tensors={}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_publishes_and_holds_the_bytes_of_a_cpu() -> None:
    revision = publisher().build(5, factors())
    assert publisher(model().cuda()).build(5, factors()).manifest == revision.manifest
    quantized = model().cuda()
    quantize_(quantized, "nvfp4-emulated", SCOPE)
    before = addresses(quantized)
    bound, digest = Receiver(quantized).apply(sent(revision))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["explorer"]
    assert addresses(quantized) == before
    bound, digest = Receiver(model().cuda()).apply(sent(revision, REGENERATOR))
    assert Expected(modules=bound, digest=digest) == revision.manifest.expected["regenerator"]


# Receipts


def receipt(published: Manifest, *, by: str = "explorer", **changes: object) -> Receipt:
    stated = published.expected[by]
    proof = Receipt(
        worker=f"{by}-0",
        role=by,
        revision=published.revision,
        score_class="c1",
        policy=published.policy,
        bound_modules=stated.modules,
        buffer_digest=stated.digest,
        probe_digest="p1",
    )
    return dataclasses.replace(proof, **changes)  # type: ignore[arg-type]


def check(revision: Manifest, *given: Receipt) -> None:
    book = ReceiptBook()
    book.expect(revision)
    for each in given:
        book.check(each)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound_modules": 0}, "explorer-0 .* bound no module of revision 1"),
        ({"bound_modules": 1}, "does not hold revision 1: its receipt states 1 modules"),
        ({"buffer_digest": "0" * 64}, "does not hold revision 1.* 000000000000; published were 2 modules"),
        ({"revision": 2}, "reports revision 2, which was not published"),
        ({"role": "learner"}, "not published for its role"),
    ],
)
def test_a_receipt_that_disagrees_stops_the_run(changes: dict[str, object], message: str) -> None:
    revision = publisher().build(1, factors()).manifest
    with pytest.raises(RunError, match=message):
        check(revision, receipt(revision, **changes))


def test_probes_must_agree_within_a_score_class_where_kernels_are_reproducible() -> None:
    revision = publisher().build(1, factors()).manifest
    other = {"worker": "explorer-1", "probe_digest": "p2"}
    check(revision, receipt(revision), receipt(revision, **other, score_class="c2"))
    check(revision, receipt(revision), receipt(revision, **other, reproducible=False))
    with pytest.raises(RunError, match=r"explorer-1 .* and explorer-0 .* probe forwards differ: p2 and p1"):
        check(revision, receipt(revision), receipt(revision, **other))


def test_the_average_is_not_mistaken_for_the_sampling_policy_after_as_many_updates() -> None:
    sampling = publisher().build(3, factors()).manifest
    average = publisher().build(3, factors(seed=7), policy="ema").manifest
    book = ReceiptBook()
    book.expect(sampling)
    book.expect(average)
    book.check(receipt(average, by="regenerator"))
    with pytest.raises(RunError, match="does not hold revision 3"):
        book.check(receipt(average, by="regenerator", policy="old"))
    with pytest.raises(RunError, match="does not hold ema after 3 updates"):
        book.check(receipt(sampling, by="regenerator", policy="ema"))


def test_a_book_judges_late_receipts_of_recent_revisions() -> None:
    made = [publisher().build(number, factors(seed=number)).manifest for number in range(6)]
    book = ReceiptBook()
    for revision in made:
        book.expect(revision)
    book.check(receipt(made[5]))
    book.check(receipt(made[4]))
    with pytest.raises(RunError, match="revision 0, which was not published"):
        book.check(receipt(made[0]))
