"""Revisions: merged and quantised once, refused when damaged, taken in place, and proved by receipts."""

import copy
import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from solrl_ray.config.schema import Lora, Model, QuantizationScope, SigmaSchedule
from solrl_ray.errors import RunError
from solrl_ray.policy import adapters
from solrl_ray.quantization import nvfp4
from solrl_ray.quantization.emulation import EmulatedNVFP4Linear
from solrl_ray.quantization.scope import quantize_
from solrl_ray.records import Receipt
from solrl_ray.revisions import receipts
from solrl_ray.revisions.payload import Expected, Revision, tensors_digest
from solrl_ray.revisions.publish import Publisher, fitting_amax
from solrl_ray.revisions.receive import Receiver, apply_merged, apply_packed, base_copies
from solrl_ray.revisions.store import RevisionStore

LORA = Lora(rank=4, alpha=8.0, targets=["to_q", "to_out.0"])
SCOPE = QuantizationScope(skip=["to_out"])
QUERY, OUT = "attn.to_q", "attn.to_out.0"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(48, 32)
        self.to_k = nn.Linear(48, 32)
        self.to_out = nn.Sequential(nn.Linear(32, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.to_out(self.to_q(x) * torch.tanh(self.to_k(x)))
        return out


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.ModuleDict({"attn": Attention()}).requires_grad_(False).eval()
    for index, parameter in enumerate(net.parameters()):
        parameter.copy_(randn(*parameter.shape, seed=index) / 6)
    return net.to(dtype)


def factors(scale: float = 0.1, seed: int = 50) -> dict[str, torch.Tensor]:
    return {
        f"{OUT}.lora_A": randn(4, 32, seed=seed) * scale,
        f"{OUT}.lora_B": randn(48, 4, seed=seed + 1) * scale,
        f"{QUERY}.lora_A": randn(4, 48, seed=seed + 2) * scale,
        f"{QUERY}.lora_B": randn(32, 4, seed=seed + 3) * scale,
    }


def model_config() -> Model:
    return Model(
        family="flux",
        path="unused",
        resolution=16,
        max_sequence_length=4,
        schedule=SigmaSchedule(kind="linear"),
        lora=LORA,
        quantization=SCOPE,
    )


def publisher(net: nn.Module | None = None, tier: str = "nvfp4-emulated") -> Publisher:
    return Publisher.for_model(model() if net is None else net, model_config(), tier)


def explorer() -> nn.Module:
    net = model()
    quantize_(net, "nvfp4-emulated", SCOPE)
    return net


def addresses(net: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}


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
    assert torch.equal(revision.packed[QUERY]["packed"], wanted.packed)
    assert torch.equal(revision.packed[QUERY]["scales"], wanted.scales)
    assert float(revision.packed[QUERY]["amax"]) == float(wanted.amax)
    assert set(revision.packed) == {QUERY}  # the scope skips to_out


def test_the_bytes_of_a_revision_do_not_depend_on_the_number_of_threads() -> None:
    wide = nn.ModuleDict({"to_q": nn.Linear(1024, 768)}).requires_grad_(False)
    wide["to_q"].weight.copy_(randn(768, 1024))
    lora = {"to_q.lora_A": randn(4, 1024, seed=1), "to_q.lora_B": randn(768, 4, seed=2)}
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            config = model_config().model_copy(update={"lora": Lora(rank=4, alpha=3.0, targets=["to_q"])})
            maker = Publisher.for_model(wide, config, "nvfp4-emulated")
            found.append(maker.build(1, lora).to_bytes())
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_revision_zero_is_what_an_explorer_quantises_at_its_start() -> None:
    zero_b = {name: value * (0 if name.endswith("B") else 1) for name, value in factors().items()}
    revision = publisher().build(0, zero_b)
    fresh = explorer()
    assert torch.equal(fresh.get_submodule(QUERY).packed, revision.packed[QUERY]["packed"])
    assert torch.equal(fresh.get_submodule(QUERY).scales, revision.packed[QUERY]["scales"])
    assert float(fresh.get_submodule(QUERY).amax) == float(revision.packed[QUERY]["amax"])
    assert revision.parent is None
    assert publisher().build(1, zero_b).parent == 0


def test_attached_adapters_do_not_change_what_is_published() -> None:
    wrapped = model()
    adapters.attach(wrapped, LORA, run_seed=1)
    assert publisher(wrapped).build(2, factors()).digest() == publisher().build(2, factors()).digest()


def test_the_scale_stays_frozen_until_a_weight_outgrows_it() -> None:
    small, smaller = publisher().build(1, factors(0.1)), publisher().build(2, factors(0.05))
    assert small.bumped == smaller.bumped == ()
    assert float(small.packed[QUERY]["amax"]) == float(smaller.packed[QUERY]["amax"])
    large = publisher().build(3, factors(2.0))
    assert large.bumped == (QUERY,)
    growth = float(large.packed[QUERY]["amax"]) / float(small.packed[QUERY]["amax"])
    assert growth > 1
    assert math.log2(growth).is_integer()


def test_a_bump_doubles_until_the_weight_fits() -> None:
    assert fitting_amax(1.5, torch.tensor([1.5])) == (1.5, False)
    assert fitting_amax(1.5, torch.tensor([1.51])) == (3.0, True)
    assert fitting_amax(1.5, torch.tensor([-13.0])) == (24.0, True)
    assert fitting_amax(0.0, torch.tensor([0.25])) == (0.25, True)


def test_not_finite_factors_are_not_published() -> None:
    bad = factors()
    bad[f"{QUERY}.lora_B"][0, 0] = float("nan")
    with pytest.raises(RunError, match=r"factor attn\.to_q\.lora_B has NaN or Inf"):
        publisher().build(1, bad)
    with pytest.raises(RunError, match=r"merged weight of attn\.to_out\.0 has NaN or Inf"):
        publisher().build(1, factors(1e25))


def test_factors_of_other_modules_are_refused() -> None:
    fewer = {name: value for name, value in factors().items() if OUT not in name}
    with pytest.raises(RunError, match=r"not those of the 2 touched modules: \['attn\.to_out\.0\.lora_A'"):
        publisher().build(1, fewer)


# The wire


def test_a_revision_survives_the_wire_bit_for_bit() -> None:
    sent = publisher().build(7, factors())
    payload = sent.to_bytes()
    received = Revision.from_bytes(payload)
    assert received.to_bytes() == payload
    assert received.digest() == sent.digest()
    assert (received.revision, received.parent, received.name) == (7, 6, "revision-000007")
    assert (received.lora_rank, received.lora_alpha, received.scaling) == (4, 8.0, 2.0)
    assert received.targets == ("to_q", "to_out.0")
    assert received.modules == (OUT, QUERY)
    assert all(torch.equal(received.factors[name], value) for name, value in factors().items())
    assert received.expected == sent.expected


def test_the_manifest_names_the_variant_and_the_nibble_order() -> None:
    body = json.loads(publisher().build(1, factors()).manifest())["manifest"]
    assert body["variant"] == "te-1d"
    assert body["nibble_order"] == "low-first"
    assert body["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["to_q", "to_out.0"]}


def flipped(payload: bytes, name: str) -> bytes:
    """The payload with one bit of a tensor turned."""
    size = int.from_bytes(payload[:8], "little")
    begin, _ = json.loads(payload[8 : 8 + size])[name]["data_offsets"]
    damaged = bytearray(payload)
    damaged[8 + size + begin + 3] ^= 0x10
    return bytes(damaged)


@pytest.mark.parametrize("name", [f"{QUERY}.packed", f"{QUERY}.scales", f"{QUERY}.amax", f"{OUT}.lora_B"])
def test_a_turned_bit_is_refused_by_the_tensors_name(name: str) -> None:
    payload = publisher().build(1, factors()).to_bytes()
    with pytest.raises(RunError, match=f"tensor '{name}' .* checksum"):
        Revision.from_bytes(flipped(payload, name))


def test_a_truncated_payload_is_refused_by_the_first_tensor_that_is_cut() -> None:
    payload = publisher().build(1, factors()).to_bytes()
    size = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + size])
    del header["__metadata__"]
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    with pytest.raises(RunError, match=f"cut off inside tensor '{last}'"):
        Revision.from_bytes(payload[:-1])
    with pytest.raises(RunError, match="cut off inside its manifest"):
        Revision.from_bytes(payload[:100])
    with pytest.raises(RunError, match="cut off inside its manifest"):
        Revision.from_bytes(b"")
    with pytest.raises(RunError, match="longer than its manifest says"):
        Revision.from_bytes(payload + b"\0")


def test_an_altered_manifest_is_refused() -> None:
    payload = publisher().build(1, factors()).to_bytes()
    assert payload.count(b'\\"revision\\":1') == 1
    with pytest.raises(RunError, match="manifest of the revision does not have the checksum"):
        Revision.from_bytes(payload.replace(b'\\"revision\\":1', b'\\"revision\\":2'))


def test_another_variant_is_refused() -> None:
    revision = publisher().build(1, factors())
    body = json.loads(revision.manifest())["manifest"] | {"variant": "ao-1d"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    manifest = json.dumps({"manifest": body, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    with pytest.raises(RunError, match="ao-1d"):
        Revision.from_parts(manifest, revision.factor_tensors() | revision.packed_tensors())


# Receivers


def test_an_explorer_ends_with_what_the_revision_states_at_the_same_addresses() -> None:
    net, revision = explorer(), publisher().build(5, factors())
    before = addresses(net)
    untouched = net["attn"].to_k.packed.clone()
    bound, digest = Receiver(net).apply(Revision.from_bytes(revision.to_bytes()))
    assert Expected(modules=bound, digest=digest) == revision.expected["explorer"]
    assert bound == 2
    assert addresses(net) == before
    assert torch.equal(net["attn"].to_k.packed, untouched)


def test_an_explorer_computes_with_the_merged_weight() -> None:
    net, merged = explorer(), model()
    Receiver(net).apply(publisher().build(5, factors(0.3)))
    Receiver(merged).apply(publisher().build(5, factors(0.3)))
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
    bound, digest = Receiver(net).apply(revision)
    assert Expected(modules=bound, digest=digest) == revision.expected["regenerator"]
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
    receiver.apply(maker.build(1, factors(seed=90)))
    receiver.apply(maker.build(2, factors()))
    once = model()
    Receiver(once).apply(maker.build(2, factors()))
    assert torch.equal(net.get_submodule(QUERY).weight, once.get_submodule(QUERY).weight)


def test_an_unquantised_explorer_expects_merged_weights() -> None:
    revision = publisher(tier="float32").build(1, factors())
    assert revision.packed == {}
    assert revision.expected["explorer"] == revision.expected["regenerator"]


def test_the_average_is_published_for_regenerators_only() -> None:
    revision = publisher().build(4, factors(), policy="ema")
    assert revision.name == "ema-000004"
    assert revision.packed == {}
    assert set(revision.expected) == {"regenerator"}
    assert Revision.from_bytes(revision.to_bytes()).policy == "ema"


def test_a_revision_of_another_base_is_refused() -> None:
    other = model()
    other.get_submodule(QUERY).weight[0, 0] += 1
    with pytest.raises(RunError, match="other base weights"):
        Receiver(other).apply(publisher().build(1, factors()))


def test_a_worker_that_holds_a_layer_otherwise_is_refused() -> None:
    unpacked = publisher(tier="float32").build(1, factors())
    with pytest.raises(RunError, match=r"does not pack attn\.to_q, which this worker holds quantised"):
        Receiver(explorer()).apply(unpacked)
    packed = publisher().build(1, factors())
    plain = model()
    with pytest.raises(RunError, match=r"packs attn\.to_q, which this worker holds unquantised"):
        apply_packed(plain, packed, base_copies(plain, packed))
    quantized = explorer()
    with pytest.raises(RunError, match=r"attn\.to_q is quantised"):
        apply_merged(quantized, packed, base_copies(model(), packed))


def test_modules_that_are_not_there_stop_the_worker() -> None:
    revision = publisher().build(1, factors())
    lacking = explorer()
    del lacking["attn"].to_q
    with pytest.raises(RunError, match=r"touches attn\.to_q, which this worker's model lacks"):
        Receiver(lacking).apply(revision)
    nothing = dataclasses.replace(revision, factors={}, packed={})
    with pytest.raises(RunError, match="touches no module"):
        Receiver(explorer()).apply(nothing)


def test_a_packed_layer_of_another_shape_is_refused() -> None:
    net = explorer()
    net["attn"].to_q = EmulatedNVFP4Linear.from_linear(nn.Linear(48, 16))
    with pytest.raises(RunError, match=r"does not fit attn\.to_q"):
        Receiver(net).apply(publisher().build(1, factors()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_publishes_and_holds_the_bytes_of_a_cpu() -> None:
    revision = publisher().build(5, factors())
    assert publisher(model().cuda()).build(5, factors()).to_bytes() == revision.to_bytes()
    quantized = model().cuda()
    quantize_(quantized, "nvfp4-emulated", SCOPE)
    before = addresses(quantized)
    bound, digest = Receiver(quantized).apply(revision)
    assert Expected(modules=bound, digest=digest) == revision.expected["explorer"]
    assert addresses(quantized) == before
    bound, digest = Receiver(model().cuda()).apply(revision)
    assert Expected(modules=bound, digest=digest) == revision.expected["regenerator"]


# Receipts


def receipt(published: Revision, *, by: str = "explorer", **changes: object) -> Receipt:
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


def test_receipts_that_prove_the_revision_are_accepted() -> None:
    revision = publisher().build(1, factors())
    receipts.check(
        [receipt(revision), receipt(revision, by="regenerator", score_class="c2", probe_digest="p2")],
        revision,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound_modules": 0}, "explorer-0 .* bound no module of revision 1"),
        ({"bound_modules": 1}, "does not hold revision 1: its receipt states 1 modules"),
        ({"buffer_digest": "0" * 64}, "does not hold revision 1.* 000000000000; published were 2 modules"),
        ({"revision": 2}, "holds revision 2, which was not published"),
        ({"role": "learner"}, "not published for its role"),
    ],
)
def test_a_receipt_that_disagrees_stops_the_run(changes: dict[str, object], message: str) -> None:
    revision = publisher().build(1, factors())
    with pytest.raises(RunError, match=message):
        receipts.check([receipt(revision, **changes)], revision)


def test_probes_must_agree_within_a_score_class_only() -> None:
    revision = publisher().build(1, factors())
    other = {"worker": "explorer-1", "probe_digest": "p2"}
    receipts.check([receipt(revision), receipt(revision, **other, score_class="c2")], revision)
    with pytest.raises(RunError, match=r"explorer-1 .* and explorer-0 .* probe forwards differ: p2 and p1"):
        receipts.check([receipt(revision), receipt(revision, **other)], revision)


def test_the_average_is_not_mistaken_for_the_sampling_policy_after_as_many_updates() -> None:
    sampling = publisher().build(3, factors())
    average = publisher().build(3, factors(seed=7), policy="ema")
    book = receipts.ReceiptBook()
    book.expect(sampling)
    book.expect(average)
    book.check(receipt(average, by="regenerator"))
    with pytest.raises(RunError, match="does not hold revision 3"):
        book.check(receipt(average, by="regenerator", policy="old"))
    with pytest.raises(RunError, match="does not hold ema after 3 updates"):
        book.check(receipt(sampling, by="regenerator", policy="ema"))


def test_no_receipt_is_no_proof() -> None:
    with pytest.raises(RunError, match="no receiver proved that it holds revision-000001"):
        receipts.check([], publisher().build(1, factors()))


def test_a_book_judges_late_receipts_of_recent_revisions() -> None:
    made = [publisher().build(number, factors(seed=number)) for number in range(6)]
    book = receipts.ReceiptBook()
    for revision in made:
        book.expect(revision)
    book.check(receipt(made[5]))
    book.check(receipt(made[4]))
    with pytest.raises(RunError, match="revision 0, which was not published"):
        book.check(receipt(made[0]))


# The store


def test_a_stored_revision_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path / "revisions"), publisher().build(20, factors())
    folder = store.save(revision)
    assert folder.name == "revision-000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        "factors.safetensors",
        "manifest.json",
        "packed.safetensors",
    ]
    assert store.load(20).to_bytes() == revision.to_bytes()
    assert store.latest() == 20
    assert [path.name for path in folder.parent.iterdir()] == ["revision-000020"]


def test_an_empty_store_has_no_latest_revision(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path / "nowhere")
    assert store.latest() is None
    with pytest.raises(RunError, match=r"revision 3 is not in .*, which holds \[\]"):
        store.load(3)


def test_half_written_folders_are_ignored_and_written_over(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path), publisher().build(2, factors())
    store.save(publisher().build(1, factors()))
    (tmp_path / "revision-000002").mkdir()
    (tmp_path / "revision-000002" / "factors.safetensors").write_bytes(b"half")
    (tmp_path / ".revision-000003.partial").mkdir()
    assert store.revisions() == [1]
    store.save(revision)
    assert store.load(2).digest() == revision.digest()


def test_a_stored_revision_never_changes(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publisher().build(1, factors()))
    written = (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns
    store.save(publisher().build(1, factors()))
    assert (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns == written
    with pytest.raises(RunError, match="a revision never changes"):
        store.save(publisher().build(1, factors(seed=99)))


def test_a_damaged_store_is_refused_by_name(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    folder = store.save(publisher().build(1, factors()))
    file = folder / "packed.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(RunError, match=r"packed\.safetensors is damaged"):
        store.load(1)
    file.write_bytes(flipped(content, f"{QUERY}.packed"))
    with pytest.raises(RunError, match=r"tensor 'attn\.to_q\.packed' of the revision does not have the checksum"):
        store.load(1)


def test_only_the_newest_revisions_are_kept(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    for number in (1, 2, 3, 10):
        store.save(publisher().build(number, factors(seed=number)))
    store.prune(keep=2)
    assert store.revisions() == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["revision-000003", "revision-000010"]


def test_equal_tensors_under_other_names_or_shapes_have_other_digests() -> None:
    x = torch.arange(4.0)
    digests = {tensors_digest({"a": x}), tensors_digest({"b": x}), tensors_digest({"a": x.view(2, 2)})}
    assert len(digests) == 3
    assert tensors_digest({"a": x, "b": x}) == tensors_digest({"b": x, "a": copy.deepcopy(x)})
