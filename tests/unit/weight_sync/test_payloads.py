"""Revisions on their way, and refusals of whatever does not verify."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from solrl_ray.config.schema import Lora
from solrl_ray.weight_sync.payload import Payload, Unusable
from solrl_ray.weight_sync.publication import CARD, EXPLORER, REGENERATOR
from tests.support.weight_sync import OUT, QUERY, factors, flipped, publication, publisher, sent


def test_a_revision_arrives_bit_for_bit() -> None:
    revision = publisher().build(7, factors())
    received = sent(revision)
    manifest = received.manifest
    assert manifest == revision.manifest
    assert (manifest.revision, manifest.name) == (7, "revision-000007")
    assert (manifest.lora, manifest.lora.scaling) == (Lora(rank=4, alpha=8.0, targets=["to_q", "to_out.0"]), 2.0)
    assert manifest.modules == (OUT, QUERY)
    assert all(torch.equal(tensor, revision.tensors[name]) for name, tensor in received.tensors.items())
    # float32 factors of one layer [4, 32] and [48, 4]; 48 inputs are padded to 64 codes of 4 bits, a scale for each 16.
    assert received.nbytes == 4 * (4 * 32 + 48 * 4) + 32 * 64 // 2 + 32 * 64 // 16 + 4


def test_everybody_is_sent_what_it_needs_and_no_more() -> None:
    revision = publisher().build(7, factors())
    lora_of_out, lora_of_query = ({f"{m}.lora_A", f"{m}.lora_B"} for m in (OUT, QUERY))
    packed = {f"{QUERY}.packed", f"{QUERY}.scales", f"{QUERY}.amax"}
    assert sent(revision, EXPLORER).tensors.keys() == lora_of_out | packed
    assert sent(revision, REGENERATOR).tensors.keys() == lora_of_out | lora_of_query
    assert sent(revision, EXPLORER, "lora").tensors.keys() == lora_of_out | lora_of_query
    assert sent(revision, CARD).tensors.keys() == set()
    full = publication(revision).payload(CARD, full=True)
    assert full.tensors.keys() == lora_of_out | lora_of_query


def test_a_payload_is_read_where_it_lies() -> None:
    payload, buffers = publication(publisher().build(1, factors())).payload(EXPLORER), list[pickle.PickleBuffer]()
    message = pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == payload.nbytes
    shared = [np.frombuffer(bytes(buffer.raw()), np.uint8) for buffer in buffers]
    received: Payload = pickle.loads(message, buffers=shared)
    received.verify()
    places = [range(each.ctypes.data, each.ctypes.data + each.nbytes) for each in shared]
    assert all(any(tensor.data_ptr() in place for place in places) for tensor in received.tensors.values())


def test_the_manifest_states_formats_scales_and_every_tensor() -> None:
    revision = publisher().build(1, factors())
    assert revision.manifest.formats == {QUERY: "nvfp4"}
    assert revision.manifest.amax == {QUERY: float(revision.tensors[f"{QUERY}.amax"])}
    assert revision.manifest.tensors.keys() == revision.tensors.keys()


@pytest.mark.parametrize("name", [f"{QUERY}.packed", f"{QUERY}.scales", f"{QUERY}.amax", f"{OUT}.lora_B"])
def test_a_turned_bit_is_refused_by_the_tensors_name(name: str) -> None:
    payload = sent(publisher().build(1, factors()))
    with pytest.raises(Unusable, match=f"tensor '{name}' of revision-000001 .* altered"):
        flipped(payload, name).verify()


@pytest.mark.parametrize("change", ["cut", "shape", "dtype"])
def test_a_tensor_of_another_size_shape_or_type_is_refused(change: str) -> None:
    payload, name = sent(publisher().build(1, factors())), f"{OUT}.lora_B"
    whole = payload.tensors[name]
    altered = {"cut": whole[:-1], "shape": whole.reshape(4, 48), "dtype": whole.view(torch.int32)}[change]
    with pytest.raises(Unusable, match=f"tensor '{name}' of revision-000001 .* altered"):
        replace(payload, tensors=payload.tensors | {name: altered}).verify()


def test_tensors_of_another_revision_are_refused() -> None:
    one, other = sent(publisher().build(1, factors())), sent(publisher().build(2, factors(seed=9)))
    with pytest.raises(Unusable, match="of revision-000002 was altered"):
        replace(other, tensors=one.tensors).verify()


def test_a_tensor_that_the_manifest_does_not_state_is_refused() -> None:
    payload = sent(publisher().build(1, factors()))
    more = replace(payload, tensors=payload.tensors | {"attn.to_v.lora_A": torch.zeros(4, 4)})
    with pytest.raises(Unusable, match=r"with tensor 'attn\.to_v\.lora_A', which its manifest does not state"):
        more.verify()
