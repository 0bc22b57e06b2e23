"""Records with tensors that cross to another process: equal there, and never pickled byte by byte."""

import pickle
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from solrl_ray.common.tensor_serialization import Portable, to_host
from solrl_ray.learning.state import LearnerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Portable):
    name: str
    whole: torch.Tensor
    parts: dict[str, torch.Tensor]
    counts: dict[str, int]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_a_tensor_of_any_type_and_shape_arrives_with_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.arange(12, dtype=torch.float32)[: torch.Size(shape).numel()].reshape(shape) - 4).abs().to(dtype)
    arrived = pickle.loads(pickle.dumps(Record(name="a", whole=sent, parts={"b": sent}, counts={"c": 3})))
    for tensor in (arrived.whole, arrived.parts["b"]):
        assert tensor.dtype == dtype
        assert tensor.shape == torch.Size(shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
    assert (arrived.name, arrived.counts) == ("a", {"c": 3})


def test_a_tensor_that_is_not_contiguous_arrives_as_it_reads() -> None:
    sent = torch.arange(12.0).reshape(3, 4).t()
    arrived = pickle.loads(pickle.dumps(Record(name="", whole=sent, parts={}, counts={})))
    assert torch.equal(arrived.whole, sent)


def test_the_bytes_travel_beside_the_pickle_and_what_arrives_is_the_receivers_own() -> None:
    sent = Record(name="", whole=torch.randn(64, 64), parts={"a": torch.randn(64, 64)}, counts={})
    message, shared = packed(sent, size=2 * 64 * 64 * 4)
    arrived = pickle.loads(message, buffers=shared)
    assert torch.equal(arrived.parts["a"], sent.parts["a"])
    arrived.parts["a"].zero_()
    assert torch.equal(pickle.loads(message, buffers=shared).parts["a"], sent.parts["a"])


def test_what_is_only_read_is_a_view_of_what_arrived() -> None:
    factors = {"m.lora_A": torch.randn(64, 64), "nothing": torch.empty(0, 4)}
    parts = {name: factors for name in ("default", "old", "ema", "exp_avg", "exp_avg_sq")}
    message, shared = packed(LearnerState(updates=1, steps=2, **parts), size=5 * 64 * 64 * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = pickle.loads(message, buffers=shared)
    assert torch.equal(arrived.ema["m.lora_A"], factors["m.lora_A"])
    assert arrived.ema["nothing"].shape == (0, 4)
    places = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in shared if buffer}
    assert arrived.ema["m.lora_A"].data_ptr() in places


def packed(record: Portable, *, size: int) -> tuple[bytes, list[bytes]]:
    """A pickle and the buffers beside it, of `size` bytes together and read-only, as in an object store."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(record, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 4096
    assert sum(buffer.raw().nbytes for buffer in buffers) == size
    return message, [bytes(buffer.raw()) for buffer in buffers]


def test_tensors_are_the_same_on_the_host() -> None:
    tensors = {"a": torch.arange(12.0).reshape(3, 4).t(), "b": torch.tensor(2.0)}
    assert {name: tensor.tolist() for name, tensor in to_host(tensors).items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
