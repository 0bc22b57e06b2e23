"""Revisions on the wire and on the disk: deltas, refusals of whatever does not verify, and the store."""

import copy
import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard

from solrl_ray.common.safetensors_file import DTYPES
from solrl_ray.config.schema import Lora, Publish
from solrl_ray.errors import RunError
from solrl_ray.weight_sync import container, payload
from solrl_ray.weight_sync.checksums import Stamp, stamp, stamps_digest, tensors_digest
from solrl_ray.weight_sync.container import Unusable
from solrl_ray.weight_sync.manifest import Manifest, canonical, sha256
from solrl_ray.weight_sync.payload import Revision
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publication, Publications
from solrl_ray.weight_sync.publish import Publisher
from solrl_ray.weight_sync.receive import Receiver
from solrl_ray.weight_sync.store import RevisionStore
from tests.support.weight_sync import OUT, QUERY, addresses, explorer, factors, publication, publisher, randn, sent


def moving(number: int) -> dict[str, torch.Tensor]:
    """Factors that drift a little with every revision."""
    steps = {name: value * (0.002 * number) for name, value in factors(seed=70).items()}
    return {name: value + steps[name] for name, value in factors().items()}


def published(numbers: range, *, snapshot_every: int = 4) -> list[Publication]:
    publications = Publications(Publish(snapshot_every=snapshot_every))
    return [publications.publish(publisher().build(number, moving(number))) for number in numbers]


def header(content: bytes) -> tuple[int, dict[str, dict[str, object]]]:
    """Where the data of a safetensors file begins, and its header."""
    (size,) = struct.unpack("<Q", content[:8])
    return 8 + size, json.loads(content[8 : 8 + size])


def flipped(content: bytes, name: str) -> bytes:
    """The payload with one bit of a tensor turned."""
    start, entries = header(content)
    begin, _ = entries[name]["data_offsets"]  # type: ignore[misc]
    damaged = bytearray(content)
    damaged[start + begin + 3] ^= 0x10
    return bytes(damaged)


def same(one: Revision, other: Revision) -> bool:
    equal = [torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items()]
    return one.manifest == other.manifest and one.tensors.keys() == other.tensors.keys() and all(equal)


# Checksums


def test_a_stamp_is_the_castagnoli_crc_of_the_bytes() -> None:
    # The check value of CRC-32C, and the 32 zero bytes and ones of RFC 3720, appendix B.4.
    assert stamp(torch.tensor(list(b"123456789"), dtype=torch.uint8)) == Stamp("U8", (9,), 0xE3069283)
    assert stamp(torch.zeros(4, 8, dtype=torch.uint8)) == Stamp("U8", (4, 8), 0x8A9136AA)
    assert stamp(torch.full((2, 4), -1, dtype=torch.int32)) == Stamp("I32", (2, 4), 0x62A8AB43)


def test_a_stamp_is_of_rows_and_not_of_memory() -> None:
    x = randn(3, 5)
    assert stamp(x.t()) == stamp(x.t().contiguous()) != stamp(x)


def test_the_names_of_types_are_those_of_safetensors() -> None:
    tensors = {name: torch.zeros(1).to(dtype) for name, dtype in DTYPES.items()}
    _, entries = header(safetensors.torch.save(tensors))
    assert {name: entry["dtype"] for name, entry in entries.items()} == {name: name for name in DTYPES}


def test_equal_tensors_under_other_names_or_shapes_have_other_digests() -> None:
    x = torch.arange(4.0)
    digests = {tensors_digest({"a": x}), tensors_digest({"b": x}), tensors_digest({"a": x.view(2, 2)})}
    assert len(digests) == 3
    assert tensors_digest({"a": x, "b": x}) == tensors_digest({"b": x, "a": copy.deepcopy(x)})
    # Known: 16 zero bytes are 4 float32 zeros.
    assert stamps_digest({"a": Stamp("F32", (4,), 1)}) == sha256("a F32 4 00000001\n")


# Payloads


def test_a_snapshot_survives_the_wire_bit_for_bit() -> None:
    revision = publisher().build(7, factors())
    content = publication(revision).payload(EXPLORER)
    received = payload.read(content)
    manifest = received.manifest
    assert manifest == revision.manifest
    assert (manifest.revision, manifest.parent, manifest.name) == (7, 6, "revision-000007")
    assert (manifest.lora, manifest.scaling) == (Lora(rank=4, alpha=8.0, targets=["to_q", "to_out.0"]), 2.0)
    assert manifest.modules == (OUT, QUERY)
    assert payload.encode(manifest, received.tensors) == content
    assert all(torch.equal(tensor, revision.tensors[name]) for name, tensor in received.tensors.items())


def test_everybody_is_sent_what_it_needs_and_no_more() -> None:
    revision = publisher().build(7, factors())
    lora_of_out, lora_of_query = ({f"{m}.lora_A", f"{m}.lora_B"} for m in (OUT, QUERY))
    packed = {f"{QUERY}.packed", f"{QUERY}.scales", f"{QUERY}.amax"}
    assert sent(revision, EXPLORER).tensors.keys() == lora_of_out | packed
    assert sent(revision, REGENERATOR).tensors.keys() == lora_of_out | lora_of_query
    assert sent(revision, EXPLORER, "lora").tensors.keys() == lora_of_out | lora_of_query
    full = payload.read(publication(revision, "lora").payload(EXPLORER, full=True))
    assert full.tensors.keys() == lora_of_out | packed


def test_any_safetensors_reader_reads_a_payload() -> None:
    revision = publisher().build(1, factors())
    tensors = safetensors.torch.load(publication(revision).payload(EXPLORER))
    assert torch.equal(tensors[f"{QUERY}.packed"], revision.tensors[f"{QUERY}.packed"])


def test_a_payload_is_read_where_it_lies() -> None:
    content = np.frombuffer(publication(publisher().build(1, factors())).payload(EXPLORER), np.uint8)
    begin, end = content.ctypes.data, content.ctypes.data + content.nbytes
    received = payload.read(content)
    assert all(begin <= tensor.data_ptr() < end for tensor in received.tensors.values())


def test_the_manifest_names_the_layout_and_states_every_tensor() -> None:
    revision = publisher().build(1, factors())
    body = json.loads(revision.manifest.to_json())["manifest"]
    assert body["layout"]["nvfp4_variant"] == "te-1d"
    assert body["layout"]["nibble_order"] == "low-first"
    assert body["layout"]["swizzled"] is False
    assert body["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["to_q", "to_out.0"]}
    assert body["formats"] == {QUERY: "nvfp4"}
    assert body["amax"] == {QUERY: float(revision.tensors[f"{QUERY}.amax"])}
    assert body["tensors"].keys() == revision.tensors.keys()


@pytest.mark.parametrize("name", [f"{QUERY}.packed", f"{QUERY}.scales", f"{QUERY}.amax", f"{OUT}.lora_B"])
def test_a_turned_bit_is_refused_by_the_tensors_name(name: str) -> None:
    content = publication(publisher().build(1, factors())).payload(EXPLORER)
    with pytest.raises(Unusable, match=f"tensor '{name}' .* checksum"):
        payload.read(flipped(content, name))


def test_a_truncated_payload_is_refused_by_the_first_tensor_that_is_cut() -> None:
    content = publication(publisher().build(1, factors())).payload(EXPLORER)
    _, entries = header(content)
    del entries["__metadata__"]
    last = max(entries, key=lambda name: entries[name]["data_offsets"][1])  # type: ignore[index]
    with pytest.raises(Unusable, match=f"cut off inside tensor '{last}'"):
        payload.read(content[:-1])
    for cut in (content[:100], content[:5], b""):
        with pytest.raises(Unusable, match="cut off inside its header"):
            payload.read(cut)
    with pytest.raises(Unusable, match="longer than its header says"):
        payload.read(content + b"\0")
    with pytest.raises(Unusable, match="header of the revision's payload is unreadable"):
        payload.read(content[:8] + b"x" + content[9:])


def test_an_altered_manifest_is_refused() -> None:
    content = publication(publisher().build(1, factors())).payload(EXPLORER)
    assert content.count(b'\\"revision\\":1') == 1
    with pytest.raises(Unusable, match="manifest of the revision does not have the checksum"):
        payload.read(content.replace(b'\\"revision\\":1', b'\\"revision\\":2'))
    with pytest.raises(Unusable, match="manifest of the revision is unreadable"):
        payload.read(safetensors.torch.save({"x": torch.zeros(1)}))


def test_another_layout_is_refused() -> None:
    text = publisher().build(1, factors()).manifest.to_json()
    body = json.loads(text)["manifest"]
    body["layout"]["nibble_order"] = "high-first"
    with pytest.raises(Unusable, match="high-first"):
        Manifest.from_json(canonical({"manifest": body, "sha256": sha256(canonical(body))}))


def test_a_tensor_that_the_manifest_does_not_state_is_refused() -> None:
    revision = publisher().build(1, factors())
    content = payload.encode(revision.manifest, {"attn.to_v.lora_A": torch.zeros(4, 4)})
    with pytest.raises(Unusable, match=r"has tensor 'attn\.to_v\.lora_A', which its manifest does not state"):
        payload.read(content)


# Deltas


def test_snapshots_come_every_n_revisions_and_deltas_between_them() -> None:
    assert [p.kind for p in published(range(6))] == ["snapshot", "delta", "delta", "delta", "snapshot", "delta"]
    # After a resume nothing is known of the state before.
    assert [p.kind for p in published(range(6, 8))] == ["snapshot", "delta"]


def test_explorers_of_another_tier_are_sent_a_snapshot() -> None:
    publications = Publications(Publish(snapshot_every=10))
    tiers = ("nvfp4-emulated", "nvfp4-emulated", "fp8", "fp8", "float32")
    sent = [publications.publish(publisher(tier=t).build(n, moving(n))) for n, t in enumerate(tiers)]
    assert [p.kind for p in sent] == ["snapshot", "delta", "snapshot", "delta", "factors"]


def test_a_chain_of_deltas_ends_in_the_bytes_of_a_snapshot() -> None:
    chain = published(range(4))
    net, fresh = explorer(), explorer()
    before = addresses(net)
    receiver = Receiver(net)
    for one in chain:
        found = receiver.apply(payload.read(one.payload(EXPLORER)))
    assert found == Receiver(fresh).apply(payload.read(chain[-1].payload(EXPLORER, full=True)))
    assert found[1] == chain[-1].revision.manifest.expected["explorer"].digest
    assert torch.equal(net["attn"].to_q.packed, fresh["attn"].to_q.packed)
    assert addresses(net) == before


def test_a_delta_is_the_zstd_frame_of_the_exclusive_or() -> None:
    first, second = published(range(2))
    name = f"{QUERY}.packed"
    tensors = safetensors.torch.load(second.payload(EXPLORER))
    assert name not in tensors
    content = zstandard.ZstdDecompressor().decompress(tensors[f"{name}.xor"].numpy().tobytes())
    parent = first.revision.tensors[name].numpy()
    wanted = parent ^ second.revision.tensors[name].numpy()
    assert content == wanted.tobytes()
    assert 0 < np.count_nonzero(wanted) < wanted.size
    _, entries = header(second.payload(EXPLORER))
    assert entries["__metadata__"]["parent"] == first.revision.manifest.packed_digest()


def refusal(net: torch.nn.Module, content: bytes) -> str:
    """Why a model cannot take a payload; it must be as it was, and the whole must do."""
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(Unusable) as caught:
        Receiver(net).apply(payload.read(content))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    return str(caught.value)


def test_a_delta_of_another_parent_is_refused_and_changes_nothing() -> None:
    chain = published(range(3))
    net = explorer()
    Receiver(net).apply(payload.read(chain[0].payload(EXPLORER)))
    said = refusal(net, chain[2].payload(EXPLORER))
    assert f"the delta of tensor '{QUERY}.packed' does not lead to the checksum that the manifest states" in said
    Receiver(net).apply(payload.read(chain[2].payload(EXPLORER, full=True)))
    assert torch.equal(net["attn"].to_q.packed, chain[2].revision.tensors[f"{QUERY}.packed"])


def test_a_damaged_delta_is_refused_and_changes_nothing() -> None:
    first, second = published(range(2))
    content = second.payload(EXPLORER)
    net = explorer()
    Receiver(net).apply(payload.read(first.payload(EXPLORER)))
    assert "cut off inside tensor" in refusal(net, content[:-3])
    frame = second.deltas[f"{QUERY}.packed"]
    whole = second.whole() | {n: t for n, t in second.revision.factors.items() if OUT in n}
    for spoiled, said in (
        (frame[:-2].clone(), "is damaged"),
        (torch.zeros(9, dtype=torch.uint8), "is damaged"),
        (
            torch.frombuffer(bytearray(zstandard.compress(b"1234")), dtype=torch.uint8),
            "is of 4 bytes, the tensor of 1024",
        ),
    ):
        deltas = second.deltas | {f"{QUERY}.packed": spoiled}
        sent = payload.encode(second.revision.manifest, whole, deltas, parent=second.parent)
        assert said in refusal(net, sent)


def test_a_delta_is_read_where_no_memory_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.empty

    def refusing(*size: Any, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return make(*size, **others)

    monkeypatch.setattr(torch, "empty", refusing)
    old, new = torch.zeros(999, dtype=torch.uint8), torch.ones(999, dtype=torch.uint8)
    frame = payload.xor_frame(new, old)
    assert frame is not None
    on_gpu: Any = SimpleNamespace(nbytes=old.nbytes, is_cuda=True)
    assert torch.equal(payload.content_of(frame, on_gpu, "a"), new)


def test_a_tensor_that_a_delta_would_not_shrink_travels_whole() -> None:
    first, far = published(range(2))[0], publisher().build(1, factors(scale=0.9, seed=5))
    assert f"{QUERY}.amax" not in published(range(2))[1].deltas  # 4 bytes are less than any frame
    noise = {name: torch.randint(0, 256, t.shape, dtype=torch.uint8) for name, t in far.packed.items() if t.dim()}
    random = dataclasses.replace(far, tensors=far.tensors | noise)
    assert payload.deltas_between(random, first.revision) == {}


def test_a_delta_is_small_where_weights_change_little() -> None:
    """0.1 % relative change of the weights: the payload of a 4-bit tensor is below 10 % of its size."""
    weight = randn(512, 1024) * 0.02
    direction_a, direction_b = randn(8, 1024, seed=1), randn(512, 8, seed=2)
    # scaling is 1, and ‖B A‖ = 0.001 ‖W‖
    size = 1e-3 * weight.norm() / (direction_b @ direction_a).norm()
    maker = Publisher({"to_q": weight}, Lora(rank=8, alpha=8.0, targets=["to_q"]), formats={"to_q": "nvfp4"})
    publications = Publications(Publish())
    made = [
        publications.publish(maker.build(n, {"to_q.lora_A": direction_a, "to_q.lora_B": direction_b * size * n}))
        for n in (1, 2)
    ]
    assert [p.kind for p in made] == ["snapshot", "delta"]
    whole = sum(tensor.numel() for tensor in made[1].revision.packed.values() if tensor.dim())
    sent = sum(frame.numel() for frame in made[1].deltas.values())
    assert 0 < sent < 0.1 * whole


# The store


def test_a_run_that_is_resumed_with_explorers_of_another_tier_stores_its_revision_anew(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publication(publisher().build(3, factors())))
    elsewhere = publisher(tier="fp8").build(3, factors())
    store.save(publication(elsewhere))
    assert same(store.load(3), elsewhere)
    with pytest.raises(RunError, match="holds a different revision-000003: a revision never changes"):
        store.save(publication(publisher().build(3, factors(scale=0.2))))


def test_a_header_of_impossible_length_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(Unusable, match="of 10 bytes is cut off inside its header"):
        container.read_metadata(tmp_path / "file")


@pytest.mark.parametrize("name", ["manifest.json", "packed.safetensors"])
def test_a_damaged_revision_is_no_obstacle_to_a_run_that_makes_it_again(tmp_path: Path, name: str) -> None:
    store, chain = RevisionStore(tmp_path), published(range(4))
    for one in chain[:3]:
        store.save(one)
    for damaged in (tmp_path / "revision-000001", tmp_path / "revision-000002"):
        (damaged / name).write_bytes((damaged / name).read_bytes()[:50])
    store.save(publication(chain[2].revision))  # as a resumed run publishes it: whole
    store.save(chain[3])
    store.prune(keep=3)
    assert same(store.load(3), chain[3].revision)


def test_a_stored_revision_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path / "revisions"), publisher().build(20, factors())
    folder = store.save(publication(revision))
    assert folder.name == "revision-000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        "factors.safetensors",
        "manifest.json",
        "packed.safetensors",
    ]
    assert same(store.load(20), revision)
    assert store.latest() == 20
    assert [path.name for path in folder.parent.iterdir()] == ["revision-000020"]


def test_stored_deltas_are_read_back_from_their_snapshot_on(tmp_path: Path) -> None:
    store, chain = RevisionStore(tmp_path), published(range(7))
    for one in chain:
        store.save(one)
    for one in chain:
        assert same(store.load(one.revision.manifest.revision), one.revision)


def test_an_empty_store_has_no_latest_revision(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path / "nowhere")
    assert store.latest() is None
    with pytest.raises(RunError, match=r"revision 3 is not in .*, which holds \[\]"):
        store.load(3)


def test_half_written_folders_are_ignored_and_written_over(tmp_path: Path) -> None:
    store, revision = RevisionStore(tmp_path), publisher().build(2, factors())
    store.save(publication(publisher().build(1, factors())))
    (tmp_path / "revision-000002").mkdir()
    (tmp_path / "revision-000002" / "factors.safetensors").write_bytes(b"half")
    (tmp_path / ".revision-000003.partial").mkdir()
    assert store.revisions() == [1]
    store.save(publication(revision))
    assert same(store.load(2), revision)


def test_a_stored_revision_never_changes(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    store.save(publication(publisher().build(1, factors())))
    written = (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns
    store.save(publication(publisher().build(1, factors())))
    assert (tmp_path / "revision-000001" / "packed.safetensors").stat().st_mtime_ns == written
    with pytest.raises(RunError, match="a revision never changes"):
        store.save(publication(publisher().build(1, factors(seed=99))))


def test_a_damaged_store_is_refused_by_name(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    folder = store.save(publication(publisher().build(1, factors())))
    file = folder / "packed.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(RunError, match=r"packed\.safetensors is damaged"):
        store.load(1)
    file.write_bytes(flipped(content, f"{QUERY}.packed"))
    with pytest.raises(RunError, match=r"tensor 'attn\.to_q\.packed' of the revision's payload does not have the chec"):
        store.load(1)
    other = publication(publisher().build(1, factors(seed=9)))
    file.write_bytes(payload.encode(other.revision.manifest, other.whole()))
    with pytest.raises(RunError, match="of another revision than the manifest beside it"):
        store.load(1)


def test_a_delta_without_its_parent_is_not_stored_and_not_read(tmp_path: Path) -> None:
    store, chain = RevisionStore(tmp_path), published(range(3))
    store.save(chain[0])
    with pytest.raises(RunError, match=r"revision-000002 is a delta, but .* does not hold revision 1"):
        store.save(chain[2])
    store.save(chain[1])
    store.save(chain[2])
    (tmp_path / "revision-000001" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"revision 1 is not in .*, which holds \[0, 2\]"):
        store.load(2)


def test_the_newest_revisions_are_kept_with_what_their_deltas_need(tmp_path: Path) -> None:
    store = RevisionStore(tmp_path)
    kept = []
    for one in published(range(10)):  # snapshots are 0, 4, 8
        store.save(one)
        store.prune(keep=2)
        kept.append(store.revisions())
    assert kept[3] == [0, 1, 2, 3]
    assert kept[4] == [0, 1, 2, 3, 4]
    assert kept[5] == [4, 5]
    assert kept[9] == [8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["revision-000008", "revision-000009"]
    assert same(store.load(9), published(range(10))[9].revision)


def test_what_is_not_finite_is_not_published_and_the_revision_before_stays(tmp_path: Path) -> None:
    store, maker = RevisionStore(tmp_path), publisher()
    net = explorer()
    good = publication(maker.build(1, factors()))
    store.save(good)
    Receiver(net).apply(payload.read(good.payload(EXPLORER)))
    bad = factors()
    bad[f"{OUT}.lora_A"][1, 1] = torch.inf
    with pytest.raises(RunError, match=r"factor attn\.to_out\.0\.lora_A has NaN or Inf: the revision is not published"):
        maker.build(2, bad)
    assert store.latest() == 1
    assert torch.equal(net["attn"].to_q.packed, store.load(1).tensors[f"{QUERY}.packed"])
