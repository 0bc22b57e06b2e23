"""Revisions on the wire, and refusals of whatever does not verify."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from solrl_ray.common.safetensors_file import DTYPES
from solrl_ray.config.schema import Lora
from solrl_ray.weight_sync import payload
from solrl_ray.weight_sync.container import Unusable
from solrl_ray.weight_sync.manifest import Manifest, canonical, sha256
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR
from tests.support.weight_sync import OUT, QUERY, factors, flipped, header, publication, publisher, sent


def test_the_names_of_types_are_those_of_safetensors() -> None:
    tensors = {name: torch.zeros(1).to(dtype) for name, dtype in DTYPES.items()}
    _, entries = header(safetensors.torch.save(tensors))
    assert {name: entry["dtype"] for name, entry in entries.items()} == {name: name for name in DTYPES}


# Payloads


def test_a_revision_survives_the_wire_bit_for_bit() -> None:
    revision = publisher().build(7, factors())
    content = publication(revision).payload(EXPLORER)
    received = payload.read(content)
    manifest = received.manifest
    assert manifest == revision.manifest
    assert (manifest.revision, manifest.name) == (7, "revision-000007")
    assert (manifest.lora, manifest.lora.scaling) == (Lora(rank=4, alpha=8.0, targets=["to_q", "to_out.0"]), 2.0)
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
    assert sent(revision, CARD).tensors.keys() == set()
    full = payload.read(publication(revision).payload(CARD, full=True))
    assert full.tensors.keys() == lora_of_out | lora_of_query


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
