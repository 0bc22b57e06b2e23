"""Revisions on the wire: deltas, and refusals of whatever does not verify."""

import copy
import dataclasses
import json
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
from solrl_ray.weight_sync import container, payload
from solrl_ray.weight_sync.checksums import Stamp, stamp, stamps_digest, tensors_digest
from solrl_ray.weight_sync.container import Unusable
from solrl_ray.weight_sync.manifest import Manifest, canonical, sha256
from solrl_ray.weight_sync.publication import EXPLORER, REGENERATOR, Publications
from solrl_ray.weight_sync.publish import Publisher
from solrl_ray.weight_sync.receive import Receiver
from tests.support.weight_sync import (
    OUT,
    QUERY,
    addresses,
    explorer,
    factors,
    flipped,
    header,
    moving,
    publication,
    published,
    publisher,
    randn,
    sent,
)

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


def test_a_header_of_impossible_length_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(Unusable, match="of 10 bytes is cut off inside its header"):
        container.read_metadata(tmp_path / "file")


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


def test_no_delta_is_between_revisions_that_state_other_formats_though_their_tensors_fit() -> None:
    publications = Publications(Publish(snapshot_every=10))
    revisions = [publisher().build(n, moving(n)) for n in range(3)]
    stated = {module: "fp8" for module in revisions[1].manifest.formats}
    manifest = dataclasses.replace(revisions[1].manifest, formats=stated)
    revisions[1] = dataclasses.replace(revisions[1], manifest=manifest)
    sent = [publications.publish(revision) for revision in revisions]
    assert [(p.kind, p.deltas, p.parent) for p in sent] == [("snapshot", {}, "")] * 3


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
